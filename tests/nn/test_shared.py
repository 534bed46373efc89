"""An operand that another GEMM has made already is not quantized a second time, and nobody can tell by the numbers."""

import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import OPERANDS
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
