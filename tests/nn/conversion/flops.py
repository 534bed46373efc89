"""FLOPs to expect of layers by their shapes, and how to count them."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_globals

from lightning_lowbit import convert
from lightning_lowbit.nn import GemmCounter, LayerKeys, QuantizedLayer
from lightning_lowbit.nn.layers.composite import PartLayer
from lightning_lowbit.nn.layers.layer import quantized_layers
from tests.nn.named_casts import NVFP4
from tests.operations import Operations

TOKENS, WIDTH = 5, 16
BACKWARD = ("dgrad", "wgrad")


def gemm(m, n, k):
    """FLOPs of ``[m, k] · [k, n]``."""
    return 2 * m * n * k


def layer(rows, inputs, outputs, without=()):
    """A linear layer's GEMMs but for some."""
    return {name: gemm(rows, outputs, inputs) for name in ("fprop", *BACKWARD) if name not in without}


def assert_counted(counter, layers, others, recomputed=0):
    """Every FLOP is in a GEMM of a converted layer, both operands quantized, or uncovered under the right name."""
    assert dict(counter.gemms) == {(name, g): flops for name, gemms in layers.items() for g, flops in gemms.items()}
    assert dict(counter.others) == dict(others)
    low_bit, rest = sum(counter.gemms.values()), sum(others.values())
    coverage = counter.coverage()
    assert coverage.flops == low_bit + rest
    assert coverage.low_bit == low_bit
    assert coverage.uncovered == dict(others)
    assert list(coverage.uncovered.values()) == sorted(others.values(), reverse=True), "the largest does not come first"
    assert coverage.uncounted == ()
    assert coverage.share == pytest.approx(low_bit / (low_bit + rest))
    assert coverage.average_bits == pytest.approx((4.5 * low_bit + 16 * rest) / (low_bit + rest))
    assert counter.recomputed == recomputed
    assert counter.model_flops == low_bit + rest - recomputed


def low_bit(model, casts=NVFP4, **kwargs):
    convert(model, casts, **kwargs)
    LayerKeys(model).fill_(0)
    return model


@contextmanager
def quantized(model):
    """Asserts that converted layers have run, and that their output is not that of the raw weights."""
    layers = {*quantized_layers(model).values()}
    seen = []

    def record(module, inputs, output):
        if module in layers:
            seen.append((module, inputs, output.detach()))

    hook = module_globals.register_module_forward_hook(record)  # a module's own would close torch's fast paths
    try:
        yield
    finally:
        hook.remove()
    assert {module for module, *_ in seen} == layers, "a converted layer did not run"
    with torch.no_grad():
        for module, (x, *part), y in seen:
            if isinstance(module, PartLayer):  # which may multiply by a part of its weight
                weight, bias = part or (module.weight_matrix(), module.bias)
                given, raw = module.quantized_forward(x, weight, bias), F.linear(x, weight, bias)
            else:
                given, raw = type(module).forward(module, x), super(QuantizedLayer, module).forward(x)
            assert torch.equal(y, given), f"{module}: not what the casts give"
            assert not torch.equal(y, raw), f"{module}: computes on the raw operands"


def backward(output):
    output = getattr(output, "logits", output)
    output.square().sum().backward()


def count(model, *inputs, runs=None, **kwargs):
    """Counts a forward and, in training, a backward pass, in which an operation ``runs``."""
    with quantized(model), Operations() as operations, GemmCounter(model) as counter:
        output = model(*inputs, **kwargs)
        if model.training:
            backward(output)
    assert runs is None or runs in operations.counts, f"{runs} did not run: {[*operations.counts]}"
    return counter


class Applied(nn.Module):
    """A function of itself and its input, with named members."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *inputs):
        return self.function(self, *inputs)
