"""Whole layers and models on the Triton kernels, in Triton's interpreter: gradients, launches, and what passes do."""

import contextlib
from collections import Counter
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_lowbit import compilation, convert
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.gpu.launches import Form
from lightning_lowbit.nn import LayerKeys
from tests.benchmarks.layers import FREE
from tests.nn.layers import layer_like
from tests.nn.native.stand_in import StandIn


def native_layer(preset):
    """How the gradients of a layer on a stand-in for tensor cores differ with kernels, and what it launches: its GEMMs,
    kernels, and operations of torch that are not free."""
    x, g = torch.randn(48, 64).bfloat16(), torch.randn(48, 80).bfloat16()
    original, found, counts = nn.Linear(64, 80, dtype=torch.bfloat16), [], []
    there = {"lightning_lowbit.nn.layers.native.native_obstacle": lambda *_: None}
    for backend in ("eager", "triton"):
        layer, gemms = layer_like(original, preset), StandIn()
        count, patches = Launches(), {**there}
        patches["lightning_lowbit.kernels.gpu.casts.run"] = count.counting(gpu.run)
        patches["torch.nn.functional.scaled_mm"] = count.counting(gemms)
        with contextlib.ExitStack() as stack:
            for name, replacement in patches.items():
                stack.enter_context(mock.patch(name, replacement))
            stack.enter_context(compilation.backend(backend))
            x = x.detach().clone().requires_grad_()
            layer(x).backward(g)  # kernels are compared with plain code before their first use
            x.grad = layer.weight.grad = layer.bias.grad = None
            if layer.lowbit.calls is not None:
                layer.lowbit.calls.begin()  # another micro-batch
            count.number = 0
            with count:
                y = layer(x)
                y.backward(g)
            found.append((y, x.grad, layer.weight.grad, layer.bias.grad))
        counts.append(count.number)
    names = "output", "gradient of x", "gradient of w", "gradient of the bias"
    texts = [f"{preset}: {name} differs" for name, *both in zip(names, *found, strict=True) if not torch.equal(*both)]
    return texts, counts[1]


def emulated_layer(preset):
    """How the gradients of a layer differ with kernels, and how often its backward pass launches each of them."""
    x, g = torch.randn(48, 64).bfloat16(), torch.randn(48, 80).bfloat16()
    original, found, kernels = nn.Linear(64, 80, dtype=torch.bfloat16), [], Counter[str]()

    def counted(launch):
        kernels[launch.kernel] += 1
        run(launch)

    run = gpu.run
    for backend in ("eager", "triton"):
        layer, x = layer_like(original, preset, backend="emulated"), x.detach().clone().requires_grad_()
        with mock.patch.object(gpu, "run", counted), compilation.backend(backend):
            layer(x).backward(g)  # kernels are compared with plain code before their first use
            x.grad = layer.weight.grad = None
            y = layer(x)
            kernels.clear()
            y.backward(g)
        found.append((y, x.grad, layer.weight.grad))
    names = "output", "gradient of x", "gradient of w"
    texts = [f"{preset}: {name} differs" for name, *both in zip(names, *found, strict=True) if not torch.equal(*both)]
    return texts, dict(kernels)


def recorded_passes(preset):
    """What two passes of a small LLaMA on a stand-in for tensor cores do after a warm-up, with other data and random
    bits: operations of torch and launches, with the shapes and dtypes of their tensors and all numbers."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config).bfloat16()
    keys = LayerKeys(convert(model, preset, skip=["lm_head"]))
    run_launch, gemms, passes = gpu.run, StandIn(), []
    with contextlib.ExitStack() as stack:
        record = Record()
        for name, replacement in {
            "lightning_lowbit.nn.layers.native.native_obstacle": lambda *_: None,
            "lightning_lowbit.kernels.gpu.casts.run": record.recording(run_launch),
            "torch.nn.functional.scaled_mm": record.recording(gemms),
        }.items():
            stack.enter_context(mock.patch(name, replacement))
        stack.enter_context(compilation.backend("triton"))
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


class Record(TorchDispatchMode):
    """Records operations, and calls of functions, whatever these do."""

    def __init__(self):
        super().__init__()
        self.events = []

    def recording(self, function):
        def call(*args, **kwargs):
            self.events.append(_described((getattr(args[0], "kernel", "GEMM"), args, kwargs)))
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.events.append(_described((operation.__name__, args, kwargs or {})))
        return operation(*args, **(kwargs or {}))


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
    """Counts operations that would be launches on a GPU, and calls of functions, whatever these do."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def counting(self, function):
        def call(*args, **kwargs):
            self.number += 1
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.number += operation.__name__.partition(".")[0] not in FREE.split()
        return operation(*args, **(kwargs or {}))
