"""The six operands of a layer: what is quantized, for which GEMM, and what the GEMMs make of it."""

from dataclasses import fields

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts
from lightning_lowbit.nn import OPERANDS, PHASES, LayerKeys, set_phase
from lightning_lowbit.quant import SURROGATES
from tests.nn.layers import GEMMS, RESULTS, by_definition, layer_like, remember, run, spied, value
from tests.nn.linear.casts import EVERYTHING, IN, OF_FORMER_STEPS, OUT, TOKENS
from tests.nn.named_casts import CASTS, REMEMBERED
from tests.tables import each

ALL_CASTS = {**CASTS, **EVERYTHING, **OF_FORMER_STEPS}


def test_every_field_is_turned():
    for field in fields(LinearCasts):
        assert len({getattr(casts, field.name) for casts in ALL_CASTS.values()}) > 1, field.name
    assert {kind for casts in ALL_CASTS.values() for kind in casts.surrogate.values()} == {*SURROGATES}


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


@each("name", CASTS)
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
