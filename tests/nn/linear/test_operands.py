"""The six operands of a layer: what is quantized, for which GEMM, how often, and what the GEMMs make of it."""

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import OPERANDS, PHASES, LayerKeys, set_phase
from lightning_lowbit.nn.core import operands
from tests.nn.layers import GEMMS, RESULTS, by_definition, every, identical, layer_like, remember, run, spied, value
from tests.nn.named_casts import CASTS, EVERYTHING, IN, OF_FORMER_STEPS, OUT, REMEMBERED, TOKENS
from tests.tables import each

ALL_CASTS = {**CASTS, **EVERYTHING, **OF_FORMER_STEPS}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("sizes", [(TOKENS, IN, OUT), (50, 40, 24)], ids=["whole blocks", "ragged"])
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL_CASTS)
def test_operands_and_gemms(name, dtype, exact, sizes):
    """Each operand is ``quantize`` along its contraction; each GEMM is the product of what its operands decode to."""
    tokens, inputs, outputs = sizes
    casts = ALL_CASTS[name]
    generator = torch.Generator().manual_seed(5)
    original = nn.Linear(inputs, outputs, dtype=dtype)
    x, g = (torch.randn(tokens, size, generator=generator).to(dtype) for size in (inputs, outputs))
    layer = layer_like(original, casts, exact=exact)
    remember(layer, *REMEMBERED)
    with spied() as seen:
        found = run(layer, x, g)
    expected = by_definition(layer, x, g, REMEMBERED)
    assert_operands(seen, expected)
    for gemm, result in RESULTS.items():
        tensor = found[result]
        assert tensor.dtype == dtype
        error = (tensor.double() - expected.results[result]).abs()
        allowed = allowance(casts, gemm, expected, dtype, exact)
        assert (error <= allowed).all(), f"{result}: off by {error.max():.2e}, {(error / allowed).max():.2f} x allowed"
    assert torch.equal(found["bias"], g.sum(0)), "db is not the sum of the unquantized g"


def assert_operands(seen, definition):
    assert tuple(seen) == OPERANDS, "operands in another order, or missing"
    for name, operand in seen.items():
        expected = definition.operands[name]
        torch.testing.assert_close(value(operand), expected, rtol=2e-7, atol=0, msg=lambda text, n=name: f"{n}: {text}")


def allowance(casts, gemm, expected, dtype, exact):
    """How far a result may be off: one rounding where the GEMM is exact, else two; sums in float32; and what else is
    rounded on the way."""
    result, eps = RESULTS[gemm], torch.finfo(dtype).eps
    size = expected.sizes[result]
    allowed = (0.51 if exact else 1) * eps * expected.results[result].abs() + size * 2.0**-21
    pair = [getattr(casts, name) for name in GEMMS[gemm]]
    rows = any(isinstance(cast, Cast) and "row" in (cast.scale.block, cast.scale.two_level) for cast in pair)
    if not exact and (gemm in casts.subtract_mean or rows):  # the mean and its product; the GEMM before what is added
        allowed += 2 * eps * expected.offsets[result]
    surrogate = {"dgrad": "fprop_x", "wgrad": "fprop_w"}.get(gemm)
    if surrogate in casts.surrogate:  # the factor, its product, and what is rotated there and back
        allowed += 2 * eps * (size if "fprop" in casts.hadamard else expected.results[result].abs())
    if casts.smooth == "token" and gemm == "fprop":  # the bias comes after the rounding of the GEMM
        allowed += eps * (expected.results[result].abs() + expected.offsets[result])
    return allowed


@each("name", CASTS, fast=8)
def test_phases_quantize_what_they_say(name):
    x, g = torch.randn(50, 40), torch.randn(50, 24)
    layer = layer_like(nn.Linear(40, 24), CASTS[name])
    remember(layer, *REMEMBERED)
    layer.forward = lambda x: layer.quantized_forward(x, layer.weight, layer.bias)  # in the phase "bf16" too
    for phase in PHASES:
        set_phase(layer, phase)
        assert layer.casts == CASTS[name].phase(phase)
        LayerKeys(layer, 1).fill_(3)  # a further call would have other bits
        with spied() as seen:
            run(layer, x, g)
        assert_operands(seen, by_definition(layer, x, g, REMEMBERED))


@each("name", CASTS)
def test_nothing_in_nothing_out(name):
    layer = layer_like(nn.Linear(IN, OUT), CASTS[name])
    found = run(layer, torch.randn(0, IN), torch.randn(0, OUT))
    shapes = {"y": (0, OUT), "x": (0, IN), "weight": (OUT, IN), "bias": (OUT,)}
    assert {key: tuple(tensor.shape) for key, tensor in found.items() if tensor is not None} == shapes
    assert not found["weight"].any() and not found["bias"].any()


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
