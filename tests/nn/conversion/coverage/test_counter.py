"""The counter leaves nothing behind, changes no result and agrees with torch's own."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_globals
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from lightning_lowbit.nn import GemmCounter
from tests.nn.conversion.coverage.flops import (
    BATCH,
    HADAMARD,
    HEADS,
    MEANS,
    NVFP4,
    TOKENS,
    WIDTH,
    Applied,
    UNet,
    assert_counted,
    backward,
    count,
    gemm,
    layer,
    low_bit,
    tower,
    x_of,
)


def traces(model):
    """Everything by which a counter could stay behind."""
    own = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    everywhere = [len(getattr(module_globals, name)) for name in vars(module_globals) if name.endswith("_hooks")]
    return own, everywhere, list(_get_current_dispatch_mode_stack()), list(warnings.filters)


def test_leaves_nothing_behind():
    model = low_bit(tower(WIDTH, 8))
    before = traces(model)
    count(model, x_of(TOKENS, WIDTH))
    assert traces(model) == before


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_leaves_nothing_behind_after_an_exception(where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "forward":
                raise RuntimeError("broken forward")
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("broken backward")

    model = low_bit(nn.Sequential(nn.Linear(WIDTH, 8), Applied(lambda self, x: Fails.apply(x)), nn.Linear(8, 4)))
    before = traces(model)
    with pytest.raises(RuntimeError, match=f"broken {where}"), GemmCounter(model):
        backward(model(x_of(TOKENS, WIDTH)))
    assert traces(model) == before
    model[1] = nn.Identity()
    assert_counted(
        count(model, x_of(TOKENS, WIDTH)), {"0": layer(TOKENS, WIDTH, 8, ["dgrad"]), "2": layer(TOKENS, 8, 4)}, {}
    )


def test_an_exception_that_the_model_catches():
    """A module that failed is not the one that runs."""

    def forward(self, x):
        try:
            return self.fails(x)
        except RuntimeError:
            return x @ self.w

    def fail(self, x):
        raise RuntimeError("broken")

    model = Applied(forward, fails=Applied(fail), w=nn.Parameter(torch.randn(WIDTH, 4)))
    with GemmCounter(model) as counter:
        backward(model(x_of(TOKENS, WIDTH)))
    assert dict(counter.others) == {"": 2 * gemm(TOKENS, 4, WIDTH)}


@pytest.mark.parametrize("changes", [{}, {"hadamard": HADAMARD, "subtract_mean": MEANS}], ids=["", "transforms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_no_result(dtype, changes):
    """Outputs and gradients are the same to the bit: random rounding, dropout and activations with kernels of their own
    (of which torch's own counter makes many operations, with a rounding each) included."""

    casts = NVFP4.replace(**changes)

    def run(counting):
        torch.manual_seed(0)
        encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.1, batch_first=True)
        activations = (nn.SiLU(), nn.GELU("tanh"), nn.Mish(), nn.Hardswish(), nn.LayerNorm(WIDTH), nn.Softplus())
        model = low_bit(nn.Sequential(encoder, *activations, nn.LogSoftmax(-1), nn.Linear(WIDTH, 4)).to(dtype), casts)
        x = torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
        with GemmCounter(model) if counting else nullcontext():
            output = model(x)
            backward(output)
        assert x.grad is not None
        return [output.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected)


def test_agrees_with_torchs_own_counter():
    """Where that has a formula for all operations, and the right one."""
    model, inputs = low_bit(UNet()), (x_of(BATCH, 3, 6, 6), x_of(BATCH, 4))
    with FlopCounterMode(display=False) as expected:
        backward(model(*inputs))
    assert count(model, *inputs).coverage().flops == expected.get_total_flops()
