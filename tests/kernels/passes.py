"""Whole layers, models and stacks on the Triton kernels, in Triton's interpreter: bits, launches, what passes do."""

import contextlib
from collections import Counter
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_lowbit import LinearCasts, compilation, convert
from lightning_lowbit.kernels.forms import CastForm
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.gpu.launches import Form
from lightning_lowbit.kernels.operands import CAST_STACK, StackForm, stack_sample
from lightning_lowbit.nn import GroupedLinear, LayerKeys
from lightning_lowbit.nn.casts.traits import CONTRACTION, GEMM, OPERANDS
from lightning_lowbit.quant.call import CastCall, operand_dtype
from tests.benchmarks.layers import FREE
from tests.kernels import interpreted
from tests.nn.layers import layer_like
from tests.nn.native.stand_in import StandIn


def layer_passes(preset, is_native):
    """How the results of a layer differ with kernels; how many launches its passes take: its GEMMs, on a stand-in for
    tensor cores, kernels, and operations of torch that are not free; and the kernels of its backward pass, by name."""
    x, g = torch.randn(48, 64).bfloat16(), torch.randn(48, 80).bfloat16()
    original, found, run = nn.Linear(64, 80, dtype=torch.bfloat16), [], gpu.run

    def counted(launch):
        kernels[launch.kernel] += 1
        run(launch)

    for backend in ("eager", "triton"):
        layer = layer_like(original, preset, **({} if is_native else {"backend": "emulated"}))
        count, kernels = Launches(), Counter[str]()
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(gpu, "run", count.counting(counted)))
            stack.enter_context(on_tensor_cores(count))
            stack.enter_context(compilation.backend(backend))
            x = x.detach().clone().requires_grad_()
            layer(x).backward(g)  # kernels are compared with plain code before their first use
            x.grad = layer.weight.grad = layer.bias.grad = None
            if layer.lowbit.calls is not None:
                layer.lowbit.calls.begin()  # another micro-batch
            count.number = 0
            with count:
                y = layer(x)
                kernels.clear()
                y.backward(g)
            found.append((y, x.grad, layer.weight.grad, layer.bias.grad))
    names = "output", "gradient of x", "gradient of w", "gradient of the bias"
    texts = [f"{preset}: {name} differs" for name, *both in zip(names, *found, strict=True) if not torch.equal(*both)]
    return texts, count.number, dict(kernels)


@contextlib.contextmanager
def on_tensor_cores(count):
    """Within this context native GEMMs run on a stand-in, and are counted."""
    there = mock.patch("lightning_lowbit.nn.layers.native.native_obstacle", lambda *_: None)
    with there, mock.patch("torch.nn.functional.scaled_mm", count.counting(StandIn())):
        yield


def recorded_passes(preset):
    """What two passes of a small LLaMA on a stand-in for tensor cores do after a warm-up, with other data and random
    bits: operations of torch and launches, with the shapes and dtypes of their tensors and all numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM  # here, since no other test needs what takes so long

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config).bfloat16()
    keys = LayerKeys(convert(model, preset, skip=["lm_head", "self_attn"]))
    passes, record = [], Launches()
    launched = mock.patch.object(gpu, "run", record.counting(gpu.run))
    with launched, on_tensor_cores(record), compilation.backend("triton"):
        for step in range(3):
            tokens = torch.randint(64, (1, 32), generator=torch.Generator().manual_seed(step))
            keys.fill_(step)
            record.events = []
            with record:
                model(input_ids=tokens, labels=tokens).loss.backward()
            passes.append(record.events)
            for parameter in model.parameters():
                parameter.grad.zero_()
    return passes[1:]


def _forms(presets):
    """The forms of the operands of presets in bfloat16, each once."""
    distinct = {}
    for preset in presets:
        casts = LinearCasts.preset(preset)
        for name in OPERANDS:
            cast, hadamard = casts.cast_of(name), casts.hadamard.get(GEMM[name])
            if cast is not None and casts.requantize == ():
                dtype, size = operand_dtype(torch.bfloat16, cast), 0 if hadamard is None else hadamard.size
                product = CastForm(cast.spec, CONTRACTION[name], torch.bfloat16, dtype, size)
                has_signs = hadamard is not None and hadamard.signs == "keyed"
                distinct.setdefault(StackForm(product, not name.endswith("w"), has_signs), f"{preset}, {name}")
    return distinct


def _many(cast, dim):
    """Arguments for 200 products, some without rows: more than a program has threads."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 5, (200,), generator=generator) * torch.randint(0, 9, (200,), generator=generator)
    x, keys = torch.randn(int(rows.sum()), 40, generator=generator).bfloat16(), torch.arange(200) * 7919
    return x, CastCall(cast, dim, keys if cast.draws else None), tuple(rows.cumsum(0).tolist())


def differences_of_stacks(presets):
    """What differs, in words, and how many forms have a kernel."""
    cases = {name: stack_sample(form, torch.device("cpu")) for form, name in _forms(presets).items()}
    return _differences_of({name: arguments for name, arguments in cases.items() if arguments is not None})


def differences_of_long_stacks(casts):
    return _differences_of({f"{cast} along {dim}": _many(cast, dim) for cast in casts for dim in (0, 1)})


def _differences_of(cases):
    texts = [interpreted.by_operation(CAST_STACK, arguments, name) for name, arguments in cases.items()]
    return sum(texts, []), len(cases)


def grouped_layer(preset, experts):
    """The launches of both passes of a grouped layer with so many experts: operations of torch and kernels."""
    torch.manual_seed(0)
    layer, count = GroupedLinear(experts, 32, 48, bias=False).bfloat16(), Launches()
    LayerKeys(convert(layer, preset, grouped="native")).fill_(0)
    ends = [4 * (i + 1) for i in range(experts)]
    x, g = torch.randn(ends[-1], 32).bfloat16().requires_grad_(), torch.randn(ends[-1], 48).bfloat16()
    with mock.patch.object(gpu, "run", count.counting(gpu.run)), compilation.backend("triton"):
        layer(x, ends).backward(g)  # kernels are compared with plain code before their first use
        x.grad = layer.weight.grad = None
        count.number = 0
        with count:
            layer(x, ends).backward(g)
    return count.number


def _described(value):
    """Text that tells tensors of other shapes, strides or dtypes, and other numbers, apart."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_described(part)}' for key, part in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_described, value))})"
    return "" if isinstance(value, Form) else str(value)


class Launches(TorchDispatchMode):
    """Counts operations that would be launches on a GPU, and calls of functions, whatever these do; and describes all
    that it sees."""

    def __init__(self):
        super().__init__()
        self.number, self.events = 0, []

    def counting(self, function):
        def call(*args, **kwargs):
            self.number += 1
            self.events.append(_described((getattr(args[0], "kernel", "GEMM"), args, kwargs)))
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.number += operation.__name__.partition(".")[0] not in FREE.split()
        self.events.append(_described((operation.__name__, args, kwargs or {})))
        return operation(*args, **(kwargs or {}))
