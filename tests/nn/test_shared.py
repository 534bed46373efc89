"""An operand that another GEMM has made already is not quantized a second time, and nobody can tell by the numbers."""

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import OPERANDS, AmaxHistories
from lightning_lowbit.nn.core import operands
from tests.nn.layers import every, identical, layer_like, run
from tests.tables import each

TILES = Cast("e2m1", Scale("e4m3", (16, 16), two_level=True))
E4M3 = Cast("e4m3", Scale("fp32", "tensor"))
SHARING = {
    "fp8-current": LinearCasts.preset("fp8-current"),
    "fp8-delayed": LinearCasts.preset("fp8-delayed"),
    "tiles": every(TILES),
}
OWN = {
    "rows": LinearCasts.preset("fp8-row"),
    "blocks": LinearCasts.preset("mxfp8"),
    "other casts": LinearCasts.preset("fp8-current").replace(dgrad_w=None, wgrad_g=E4M3),
    "stochastic": every(E4M3.replace(rounding="stochastic")),
    "rotated": LinearCasts.preset("fp8-current").replace(hadamard={"dgrad": 16}),
    "means": LinearCasts.preset("fp8-current").replace(subtract_mean=("dgrad",)),
}


def two_steps(casts, **settings):
    torch.manual_seed(0)
    layer = layer_like(nn.Linear(40, 24), casts, **settings)
    histories = AmaxHistories(layer)
    results = []
    for scale in (1.0, 2.0):
        results.append(run(layer, scale * torch.randn(20, 40), torch.randn(20, 24), autocast=True))
        histories.advance_()
    return results, histories


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", SHARING)
def test_sharing_changes_no_bit(monkeypatch, name, exact):
    found, histories = two_steps(SHARING[name], exact=exact)
    monkeypatch.setattr(LinearCasts, "shared", lambda *_: False)
    expected, expected_histories = two_steps(SHARING[name], exact=exact)
    for ours, theirs in zip(found, expected, strict=True):
        identical(ours, theirs, name)
    state, expected_state = (h.state_dict()["amax_history"] for h in (histories, expected_histories))
    identical(state, expected_state, f"amax history of {name}")
    assert len(state) == (6 if name == "fp8-delayed" else 0)


@each("name", [*SHARING, *OWN])
def test_each_operand_is_made_once(monkeypatch, name):
    casts = {**SHARING, **OWN}[name]
    made, original = [], operands.quantize_operand
    monkeypatch.setattr(operands, "quantize_operand", lambda *args: made.append(args) or original(*args))
    layer = layer_like(nn.Linear(32, 48), casts)
    run(layer, torch.randn(16, 32), torch.randn(16, 48))
    count = sum(isinstance(getattr(casts, operand), Cast) for operand in OPERANDS)
    shared = 2 if name in SHARING else 0  # w in dgrad, g in wgrad
    assert len(made) == count - shared, f"{len(made)} of {count} operands were quantized"


def test_without_a_gradient_of_x_g_is_made_for_wgrad():
    layer = layer_like(nn.Linear(32, 48), SHARING["fp8-current"])
    x, g = torch.randn(16, 32), torch.randn(16, 48)
    with_x, without = run(layer, x, g), run(layer, x, g, needs_x=False)
    assert without.pop("x") is None
    with_x.pop("x")
    identical(without, with_x)
