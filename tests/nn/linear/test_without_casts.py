"""Without casts a layer is ``nn.Linear`` to the bit."""

import pytest
import torch
from torch import nn

from lightning_lowbit import LinearCasts
from tests.nn.layers import identical, layer_like, run
from tests.nn.named_casts import IN, ONE_LEVEL, OUT, TOKENS
from tests.tables import each


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "float64", "autocast"])
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (13, IN), (3, 5, IN), (2, 3, 5, IN), (0, IN), (3, 0, IN)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_without_casts_is_linear(shape, bias, mode):
    dtype = torch.float32 if mode == "autocast" else getattr(torch, mode)
    original = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    x, g = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], OUT, dtype=dtype)
    expected = run(original, x, g, mode == "autocast")
    layer = layer_like(original, "bf16")
    identical(run(layer, x, g, mode == "autocast"), expected, f"{mode} {shape}")
    layer.forward = lambda x: layer.quantized_forward(x, layer.weight, layer.bias)
    identical(run(layer, x, g, mode == "autocast"), expected, f"through the six casts, {mode} {shape}")


@each("autocast", [False, True])
@each("frozen", ["weight", "bias", "input", "weight and bias", "all"])
def test_without_casts_frozen(frozen, autocast):
    original = nn.Linear(IN, OUT)
    for name, p in original.named_parameters():
        p.requires_grad_(name not in frozen and frozen != "all")
    x, g = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
    needs_x = frozen not in ("input", "all")
    expected = run(original, x, g, autocast, needs_x)
    identical(run(layer_like(original, "bf16"), x, g, autocast, needs_x), expected, frozen)
    quantized = run(layer_like(original, "nvfp4"), x, g, autocast, needs_x)
    assert {n for n, t in quantized.items() if t is None} == {n for n, t in expected.items() if t is None}


FLOAT64 = {"dtype": torch.float64}
SQUARE = nn.Linear(IN, IN)


@each(
    ("original", "x", "g", "autocast"),
    [
        # Autocast leaves float64 alone.
        (nn.Linear(IN, OUT, **FLOAT64), torch.randn(TOKENS, IN, **FLOAT64), torch.randn(TOKENS, OUT, **FLOAT64), True),
        # The gradients of both uses add up in the dtype in which they add up in nn.Linear.
        *((nn.Sequential(SQUARE, SQUARE), *torch.randn(2, TOKENS, IN), autocast) for autocast in (False, True)),
        # Not contiguous
        (nn.Linear(IN, OUT), *(torch.randn(size, 6, 5).permute(1, 2, 0) for size in (IN, OUT)), False),
    ],
)
def test_without_casts_in_other_situations(original, x, g, autocast):
    identical(run(layer_like(original, "bf16"), x, g, autocast), run(original, x, g, autocast))


def test_mixed_dtypes_are_refused():
    layer = layer_like(nn.Linear(IN, OUT), LinearCasts(fprop_w=ONE_LEVEL))
    with pytest.raises(ValueError, match=r"got torch\.bfloat16 and torch\.float32"):
        layer(torch.randn(2, IN).bfloat16())
