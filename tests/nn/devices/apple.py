"""A device that computes on the CPU what it is asked, and has no dtypes and operators that Apple's GPUs lack.

Torch knows it in the whole process: run this module in one of its own.

    python -m tests.nn.devices.apple
"""

import os
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from lightning_lowbit import StableSPAM, convert
from lightning_lowbit._torch.devices import _LACKING, device_like_mps
from lightning_lowbit.nn import PRESETS, AmaxHistories, GroupedLinear, LayerKeys
from lightning_lowbit.nn.core.watch import Watch

_setup_privateuseone_for_python_backend("apple")
DEVICE = torch.device("apple:0")
LACKING = {*_LACKING["mps"], torch.complex128}
# Of the table of operators of torch 2.13 (native_functions.yaml), what the package calls on other devices.
ABSENT = {"aten.frexp.Tensor", "aten.mm.dtype", "aten._int_mm.default", "aten._scaled_mm.default"}


class OnApple(Tensor):
    """A tensor on the device, whose numbers ``inner`` has."""

    @staticmethod
    def __new__(cls, inner):
        if inner.dtype in LACKING:
            raise TypeError(f"The device has no {inner.dtype}.")
        size, strides, offset = inner.size(), inner.stride(), inner.storage_offset()
        return Tensor._make_wrapper_subclass(
            cls, size, strides=strides, storage_offset=offset, dtype=inner.dtype, device=DEVICE
        )

    def __init__(self, inner):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    name, tensors = str(func), [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    target = kwargs.get("device", DEVICE if any(isinstance(x, OnApple) for x in tensors) else None)
    is_here = target is not None and torch.device(target).type == DEVICE.type
    if name in ABSENT:
        raise NotImplementedError(f"The device has no {name}.")
    if is_here and kwargs.get("dtype") in LACKING:
        raise TypeError(f"The device has no {kwargs['dtype']}.")
    if "copy" not in name and any(x.dim() > 0 and not isinstance(x, OnApple) for x in tensors):
        raise RuntimeError(f"{name} gets tensors of two devices.")
    result = func(*tree_map(inside, args), **tree_map(inside, kwargs))
    if not func._schema.returns:
        return None
    if func._schema.is_mutable:
        return kwargs["out"] if "out" in kwargs else args[0]
    if not is_here:
        return result
    return tree_map(lambda x: OnApple(x) if isinstance(x, Tensor) and not isinstance(x, OnApple) else x, result)


def inside(value):
    if isinstance(value, torch.device) and value.type == DEVICE.type:
        return torch.device("cpu")
    return value.inner if isinstance(value, OnApple) else value


def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return OnApple(torch.empty(size, dtype=dtype, device="cpu"))


def empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return OnApple(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def copy_from(source, target, non_blocking=False):
    inside(target).copy_(inside(source))
    return target


class Attention(nn.Module):
    def __init__(self, **where):
        super().__init__()
        self.other = nn.Linear(1, 1, **where)  # models without a layer are refused

    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


KINDS = {
    "linear": (lambda **where: nn.Linear(64, 48, **where), (40, 64), ()),
    "convolution": (lambda **where: nn.Conv2d(16, 32, 3, **where), (2, 16, 5, 5), ()),
    "experts": (lambda **where: GroupedLinear(3, 64, 48, **where), (40, 64), ([5, 5, 40],)),
    "attention": (Attention, (2, 2, 16, 32), ()),
}
SETTINGS = [{}, {"save": "codes"}, {"what": "operand_sums"}, {"what": "gradient_sums"}]


def results(casts, kind, dtype, device, save="inputs", what=None):
    """Output, gradients, statistics and updated weights of a step, on the CPU."""
    make, shape, arguments = KINDS[kind]
    torch.manual_seed(0)
    layer, x = make(dtype=dtype), torch.randn(*shape).to(dtype)
    if device != "cpu":
        state = layer.state_dict()
        layer = make(dtype=dtype, device=device)
        for name, parameter in layer.named_parameters():
            parameter.detach().copy_(state[name])
    casts, attention = ("bf16", casts) if kind == "attention" else (casts, None)
    convert(model := nn.Sequential(layer), casts, backend="emulated", save=save, attention=attention)
    LayerKeys(model, seed=1).fill_(2)
    histories, x = AmaxHistories(model), x.to(device).requires_grad_()
    watch = None if what is None else Watch({"0": layer}, what, of_blocks=what == "operand_sums")
    if watch is not None:
        watch.start(torch.device(device))
    y = layer(x, *arguments)
    y.backward(torch.linspace(-2, 3, y.numel()).view(y.shape).to(dtype).to(device))
    histories.advance_()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    moments = "fp8" if kind == "experts" else "fp32"
    # With this eps, gradients that are rounding errors move no weight.
    StableSPAM(model.parameters(), lr=1e-2, eps=1e-4, moments=moments).step()
    tensors = [y, x.grad, *gradients, *model.parameters()] + ([] if watch is None else [watch.sums])
    return [tensor.detach().to("cpu") for tensor in tensors]


def has_settings(name, kind, settings):
    """Whether a step with these settings differs from others."""
    if kind == "attention" and name not in ("nvfp4", "mxfp8", "fp8-current", "int8"):
        return False
    packs = PRESETS[name]().traits.coded is not None
    return not settings or (kind == "linear" and name != "bf16" and (settings.get("save") != "codes" or packs))


def step_fault(name, kind, dtype, settings):
    """Says how a step on the device differs from one on the CPU; None if it does not."""
    expected = results(name, kind, dtype, "cpu", **settings)
    try:
        outcome = results(name, kind, dtype, DEVICE, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    least = 1e-5 if dtype == torch.float32 else 2.0**-7
    sizes = [
        f"{float((a.double() - b.double()).abs().max() / a.double().abs().max()):.1e}"
        for a, b in zip(expected, outcome, strict=True)
        if not torch.allclose(a.double(), b.double(), rtol=least, atol=least * float(a.double().abs().max()))
    ]
    return f"off by {sizes}" if sizes else None


def main():
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    is_right = True
    with device_like_mps(DEVICE.type):
        for name, kind, dtype, settings in product(PRESETS, KINDS, (torch.float32, torch.bfloat16), SETTINGS):
            if not has_settings(name, kind, settings):
                continue
            if (fault := step_fault(name, kind, dtype, settings)) is not None:
                print(f"{name}, {kind}, {dtype}, {settings}: {fault}", flush=True)
                is_right = False
    return 0 if is_right else 1


if __name__ == "__main__":
    status = main()
    # Python does not end: a thread of torch for the device may still work, and aborted 2 of 8 runs of torch 2.15.
    os._exit(status)
