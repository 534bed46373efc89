"""Overflows reach every gradient, so that loss scaling sees them."""

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, Scale
from tests.nn.layers import GEMMS, every, layer_like, remember, run
from tests.nn.linear.casts import IN, OUT, TOKENS
from tests.nn.named_casts import (
    ALL_MEANS,
    DELAYED,
    FP8_TENSORS,
    INT8_ROWS,
    REMEMBERED,
    SATURATING,
    STOCHASTIC,
    TWO_LEVEL,
)

TRANSFORMED = {"hadamard": dict.fromkeys(GEMMS, 16), "subtract_mean": ALL_MEANS}

OVERFLOW = {
    **{str(cast): every(cast) for cast in (STOCHASTIC, TWO_LEVEL)},
    **{name: every(Cast(name, Scale("e4m3", 16))) for name in ("int4", "ternary")},
    "rows": INT8_ROWS,
    "tensors": FP8_TENSORS,
    "transformed": every(STOCHASTIC, **TRANSFORMED),
    "transformed rows": every(INT8_ROWS.fprop_x, **TRANSFORMED),
    "surrogates": every(SATURATING, surrogate={"fprop_x": "dge", "fprop_w": "trust"}),
    "delayed": DELAYED,
    "delayed blocks": every(Cast("e2m1", Scale("e4m3", 16, two_level=True, source="delayed"))),
    "delayed, reused": DELAYED.replace(dgrad_w="fprop", wgrad_x="fprop"),
    "channels": FP8_TENSORS.replace(smooth="channel"),
    "tokens": DELAYED.replace(smooth="token"),
}


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
