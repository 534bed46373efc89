"""Scales in E8M0, fp32 and ExMy: what each makes of the largest magnitude of a block, by hand where possible."""

import itertools

import pytest
import torch

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS
from tests.quant.tensors import float_scales, same
from tests.references import quantize as reference
from tests.tables import each

BELOW, ABOVE = -torch.inf, torch.inf


def scale_of(largest, element, scale):
    """The stored scale of a block with this largest magnitude."""
    return float_scales(quantize(torch.tensor([[largest, -largest / 4]]), Cast(element, scale))).item()


def beside(value, towards):
    """The next float32."""
    return torch.nextafter(torch.tensor(value), torch.tensor(towards)).item()


# Magnitudes at which a rule steps up by one power of two: the first that does; the float32 below does not.
STEPS = {
    ("e2m1", "floor"): 8.0,  # 4 has the exponent of 6
    ("e2m1", "ceil"): beside(4.0, ABOVE),
    ("e2m1", "even"): 7.0,  # 1.75 has no digit for .75: a tie between 1.5 and 2, to even
    ("e2m1", "rceil"): beside(6.0, ABOVE),
    ("e4m3", "floor"): 512.0,
    ("e4m3", "even"): 496.0,  # 1.1111b in three digits
    ("e4m3", "rceil"): beside(448.0, ABOVE),
    ("e3m0", "even"): 24.0,
    ("e3m0", "rceil"): beside(16.0, ABOVE),
    ("int4", "even"): 7.5,
    ("int4", "rceil"): beside(7.0, ABOVE),
    ("int8", "even"): 127.5,
    ("ternary", "even"): 1.5,
    ("ternary", "ceil"): beside(1.0, ABOVE),
}


@each(("element", "rounding"), STEPS)
def test_e8m0_steps(element, rounding):
    scale, first = Scale("e8m0", 32, rounding), STEPS[element, rounding]
    for exponent in (-100, -3, 0, 5, 100):
        unit = 2.0**exponent
        found = [scale_of(value * unit, element, scale) for value in (beside(first, BELOW), first)]
        assert found == [unit, 2 * unit], f"{element} {rounding}: scales {found} for a step at {first} * 2^{exponent}"


@pytest.mark.parametrize("rounding", ["floor", "ceil", "even", "rceil"])
def test_e8m0_ends(rounding):
    """Bytes 0 and 254: beyond, elements lose digits or saturate, and nothing wraps around."""
    scale = Scale("e8m0", 32, rounding)
    for tiny in (0.0, 2.0**-149, 2.0**-128, 2.0**-127):
        assert scale_of(tiny, "ternary", scale) == 2.0**-127, f"{rounding}: the block of {tiny}"
    for huge in (2.0**127, torch.finfo(torch.float32).max):
        assert scale_of(huge, "ternary", scale) == 2.0**127, f"{rounding}: the block of {huge}"
    values = quantize(torch.tensor([[2.0**-127, 2.0**-128, 2.0**-130]]), Cast("e2m1", scale)).dequantize()
    assert values.tolist() == [[2.0**-127, 2.0**-128, 0.0]], f"{rounding}: subnormal elements"
    largest = torch.tensor([[torch.finfo(torch.float32).max, -1.0]])
    assert quantize(largest, Cast("ternary", scale)).dequantize().tolist() == [[2.0**127, 0.0]]


def test_prescale_by_hand():
    """The scale of 5.2 is 1, as without the prescale: 5.2 * 3/4 = 3.9 rounds to 4, which decodes to 16/3; 7.5 to 8."""
    x = torch.tensor([[5.2, 1.3, -1.0, 0.0], [7.5, 4.0, -1.0, 0.0]])
    plain, scaled = (quantize(x, Cast("e2m1", Scale("e8m0", 32, "floor", prescale=p))) for p in (1, 0.75))
    assert plain.dequantize().tolist() == [[6.0, 1.5, -1.0, 0.0], [6.0, 4.0, -1.0, 0.0]]  # 5.2 and 7.5 alike: 6
    assert plain.tensor_scale is None
    same(float_scales(scaled), float_scales(plain), "scales with and without prescale")
    expected = torch.tensor([[4.0, 1.0, -1.0, 0.0], [6.0, 3.0, -1.0, 0.0]]) * (4 / 3)  # ties to even
    torch.testing.assert_close(scaled.dequantize(), expected)


@each("element", ELEMENT_FORMATS)
def test_fp32_scales(element):
    largest = ELEMENT_FORMATS[element].max
    for factor in (1.0, 2.0, 0.75, 3.3, 1e-30, 1e30, 1e-44):
        amax = torch.tensor(largest * factor if factor < 1e30 else 1e30).item()
        exact, power = (scale_of(amax, element, Scale("fp32", 16, rule)) for rule in ("nearest", "power_of_two"))
        ideal = amax / largest
        if ideal > 2.0**-127:  # below, 1 / scale would overflow
            assert exact == pytest.approx(ideal, rel=2.0**-22), f"{element}: the scale of {amax}"
            assert ideal <= power * (1 + 2.0**-23) < 2 * ideal * (1 + 2.0**-22), f"{element}: power of two for {amax}"
        assert torch.tensor(power).frexp().mantissa == 0.5, f"{element}: {power} is no power of two"
    for rule in ("nearest", "power_of_two"):
        assert scale_of(0.0, element, Scale("fp32", 16, rule)) == 1, f"{element}: the scale of zeros, {rule}"
        for block in ("row", "tensor"):
            assert scale_of(largest * 8, element, Scale("fp32", block, rule)) == 8, f"{element}, {block}, {rule}"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("rounding", ["nearest", "power_of_two"])
@pytest.mark.parametrize("element", ELEMENT_FORMATS)
def test_margins_end_where_float32_does(element, rounding):
    """Room beyond the largest float32 is no room: scales stay finite, and zeros are zeros."""
    for block, margin in itertools.product((16, "row", "tensor"), (0, 1, 10, 40, 64)):
        cast = Cast(element, Scale("fp32", block, rounding, margin=margin))
        for amax in (1e-44, 1e22, 1e30, 3e38, torch.finfo(torch.float32).max):
            x = torch.tensor([[amax, -amax / 4, 0.0]])
            found = quantize(x, cast)
            scale = float_scales(found).max().item()
            assert scale < torch.inf, f"{cast}: the scale of {amax} is infinite"
            wanted = x[0, 0].item() / ELEMENT_FORMATS[element].max * 2.0**margin
            assert scale >= min(wanted, 2.0**127) * 0.999, f"{cast}: the scale of {amax} is {scale}, not {wanted}"
            values = found.dequantize()[0]
            assert values[2] == 0, f"{cast}: 0 beside {amax} became {values[2]}"
            assert not values.isnan().any(), f"{cast}: {x.tolist()} became {values.tolist()}"
            assert (values.sign() * x[0].sign() >= 0).all(), f"{cast}: {x.tolist()} became {values.tolist()}"
            same(found.dequantize(), reference.quantize(x, cast, field="dequantized"), f"{cast} of {amax}")
