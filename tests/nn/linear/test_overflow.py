"""Overflows reach every gradient, so that loss scaling sees them."""

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, Scale
from tests.nn.layers import every, layer_like, remember, run
from tests.nn.linear.casts import IN, OUT, TOKENS
from tests.nn.named_casts import CASTS, REMEMBERED

NAMED = (
    *("nvfp4", "all stochastic", "mean and hadamard", "rows", "rows, hadamard and mean", "tensors", "surrogates"),
    *("fp8-delayed", "delayed, two levels", "delayed, reused", "channels", "tokens, delayed"),
)
OVERFLOW = {name: CASTS[name] for name in NAMED}
OVERFLOW |= {name: every(Cast(name, Scale("e4m3", 16))) for name in ("int4", "ternary")}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("casts", OVERFLOW)
def test_overflows_reach_every_gradient(bad, casts):
    """A bad element of g is seen in dX and dW by its row or column, one of w in dX, one of x in dW."""
    hits = {"x": {"weight": (slice(None), 20), "y": (20,)}, "w": {"x": (slice(None), 20), "y": (slice(None), 20)}}
    hits["g"] = {"weight": (20,), "x": (20,)}
    for where, expected in hits.items():
        layer = layer_like(nn.Linear(IN, OUT), OVERFLOW[casts])
        remember(layer, *REMEMBERED)
        x, g = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
        {"x": x, "w": layer.weight.data, "g": g}[where][20, 20] = bad
        found = run(layer, x, g)
        for name, place in expected.items():
            tensor = found[name]
            assert not tensor[place].isfinite().any(), f"{bad} in {where} does not reach {name}"
