"""Scales in E8M0, fp32, ExMy and two levels: what each makes of the largest magnitudes, means and ends of blocks."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS
from tests.quant.tensors import EXMY, float_scales, same, sample
from tests.references import quantize as reference
from tests.tables import each

BELOW, ABOVE = -torch.inf, torch.inf
FP32_ROUNDINGS = ("nearest", "power_of_two")


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
    for ideal in (1.0, 2.0, 0.75, 3.3, 1e-30):
        exact, power = (scale_of(largest * ideal, element, Scale("fp32", 16, rule)) for rule in FP32_ROUNDINGS)
        assert exact == pytest.approx(ideal, rel=2.0**-22), f"{element}: the scale of {largest * ideal}"
        assert math.log2(power).is_integer(), f"{element}: {power} is no power of two"
        assert ideal <= power * (1 + 2.0**-23) < 2 * ideal * (1 + 2.0**-22), f"{element}: {power} instead of {ideal}"
    for rule, block in itertools.product(FP32_ROUNDINGS, (16, "row", "tensor")):
        found = [scale_of(amax, element, Scale("fp32", block, rule)) for amax in (0.0, largest * 8)]
        assert found == [1, 8], f"{element}, {block}, {rule}: scales of zeros, and of eight times the largest level"


@pytest.mark.fast("e2m1-nearest", "e4m3-power_of_two", "e5m2-nearest", "int8-nearest", "ternary-power_of_two")
@pytest.mark.parametrize("rounding", FP32_ROUNDINGS)
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


# --- two levels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "largest"), [("e4m3", 256), ("e5m2", 2.0**15), ("e3m4", 16)])
def test_four_over_six_leaves_room_for_six_fourths(format, largest):
    scale = Scale(format, 16, two_level=True, four_over_six="mse")
    assert scale.largest == largest and 1.5 * largest <= SCALE_FORMATS[format].max < 3 * largest
    x = torch.rand(64, 16) + 3  # a block of near equals is better off with its maximum at 4
    error, plain = (
        (quantize(x, Cast("e2m1", replace(scale, top=top))).dequantize() - x).square().mean()
        for top in (None, SCALE_FORMATS[format].max)
    )
    assert error < plain, f"with room {error}, without {plain}"


@each(
    ("scale", "top"),
    [
        (Scale(two_level=True), 448),
        (Scale(two_level=True, top=256), 256),
        (Scale("e5m2", 16, two_level=True), 57344),
        (Scale("e1m6", 16, "up", two_level=True, top=2.5), 2.5),
        (Scale("e8m0", 16, two_level=True), 1),
        (Scale("e8m0", 16, two_level=True, top=4096), 4096),
        (Scale("e4m3", "row", two_level=True), 448),
        (Scale("e4m3", (4, 16), two_level=True, top=256, four_over_six="mse"), 256),
        (Scale("e4m3", 16, two_level=True, four_over_six="mse"), 256),  # whose 6/4, 384, is a scale too
        (Scale("e5m2", 16, two_level=True, four_over_six="mae"), 32768),
    ],
)
def test_top_is_the_scale_of_the_largest_block(scale, top):
    x = torch.tensor([[1.5] + [0.0] * 31, [1e-3] * 32])
    found = quantize(x, Cast("e2m1", scale))
    highest = float_scales(found).max().item()
    assert highest in ((top,) if scale.four_over_six is None else (top, 1.5 * top)), f"{scale}: {highest}"
    torch.testing.assert_close(found.dequantize()[0, 0].item(), 1.5, rtol=2.0**-21, atol=0)
    expected = torch.div(torch.tensor(top * 6.0), torch.tensor(1.5)).reciprocal()
    same(found.tensor_scale, expected, f"{scale}: 1/S")


@each("element", ["e2m1", "int8", "ternary", "e5m2"])
@each("top", [2.0**100, 2.0**127])
def test_a_large_top_is_honored_or_refused(element, top):
    """Powers of two move scales and leave codes alone; what is too large for float32 is refused, and by us."""
    x = sample(2, 32)
    x = x / x.abs().max() * 2.0**30  # so that S is in range
    try:
        cast = Cast(element, Scale("e8m0", 16, two_level=True, top=top))
    except ValueError as refused:
        assert "top" in str(refused), f"{element}, top {top}: {refused}"  # noqa: PT017
        return
    found, plain = quantize(x, cast), quantize(x, cast.replace(scale={"top": None}))
    same(found.codes, plain.codes, f"{element}, top {top}, codes")
    torch.testing.assert_close(found.dequantize(), plain.dequantize(), rtol=1e-6, atol=0, msg=f"{element}, top {top}")


@pytest.mark.parametrize("top", [2.0**-120, 2.0**-9])
def test_a_small_top_gives_small_scales_and_no_nan(top):
    """S may be subnormal for a large tensor, and 1/S must not be infinite."""
    for amax in (1e-30, 1.0, 3e38):
        found = quantize(torch.tensor([[amax, -amax / 3]]), Cast("e2m1", Scale(two_level=True, top=top)))
        assert found.dequantize().isfinite().all(), f"top {top}, amax {amax}: {found.dequantize().tolist()}"


@each("scale_format", [*EXMY, "e8m0"])
def test_an_amax_that_is_far_too_small(scale_format):
    """What exceeds the largest scale saturates, however far it does: b * S may be infinite, its scale is not small."""
    scale = Scale(scale_format, 16, two_level=True)
    found = quantize(torch.full((1, 4), 2.0**60), Cast("e2m1", scale), amax=torch.tensor(2.0**-100))
    assert float_scales(found).item() >= scale.storage.max / 2, f"{scale_format}: scale {float_scales(found).item()}"
    assert found.codes.tolist() == [[7] * 4], f"{scale_format}: not the largest code"


# --- means, and least and largest elements ----------------------------------------------------------------------------

INTEGERS = [f"int{bits}" for bits in range(2, 9)]
FLOAT32_MAX = torch.finfo(torch.float32).max


def minmax(element, block=16, **settings):
    return Cast(element, Scale("fp32", block, statistic="minmax", **settings))


def absmean(element, block=16, **settings):
    return Cast(element, Scale("fp32", block, statistic="absmean", **settings))


def test_absmean_by_hand():
    """The mean becomes 1; half of it is a tie, to 0; larger elements saturate."""
    x = torch.tensor([[6.0, -2.0, 1.0, -1.0, 0.0]])  # 10 / 5
    for factor, scale, codes in (
        (1.0, 2.0, [1, -1, 0, 0, 0]),
        (0.5, 1.0, [1, -1, 1, -1, 0]),
        (4.0, 8.0, [1, 0, 0, 0, 0]),
    ):
        for block in (5, (1, 5), "row", "tensor"):
            found = quantize(x, absmean("ternary", block, factor=factor))
            assert found.scales.flatten().tolist() == [scale], f"factor {factor}, block {block}: scale"
            assert found.elements().tolist() == [codes], f"factor {factor}, block {block}"
            assert found.zero_points is None
    assert quantize(x, absmean("int4")).elements().tolist() == [[3, -1, 0, 0, 0]], "ties to even: 1/2 of the mean is 0"


def test_minmax_by_hand():
    """2^bits levels from the least element to the largest, 0 among them; codes count from the least."""
    rows = {
        "both signs": ([-1.0, 2.0, 0.0, 1.2], 1.0, 1, [0, 3, 1, 2]),
        "positive": ([3.0, 1.0, 2.0, 6.0], 2.0, 0, [2, 0, 1, 3]),  # 0.5 and 1.5 are ties, to even: 0 and 2
        "negative": ([-3.0, -1.0, -2.0, -6.0], 2.0, 3, [1, 3, 2, 0]),
        "zeros": ([0.0, 0.0, 0.0, 0.0], 1.0, 0, [0, 0, 0, 0]),
    }
    found = quantize(torch.tensor([row for row, *_ in rows.values()]), minmax("int2", "row"))
    for i, (name, (_, scale, zero, codes)) in enumerate(rows.items()):
        assert found.scales[i].item() == scale, f"{name}: scale {found.scales[i].item()}"
        assert found.zero_points[i].item() == zero, f"{name}: zero point {found.zero_points[i].item()}"
        assert found.codes[i].tolist() == codes, f"{name}: codes {found.codes[i].tolist()}"
        values = [(code - zero) * scale for code in codes]
        assert found.dequantize()[i].tolist() == values, f"{name}: values {found.dequantize()[i].tolist()}"
        assert found.elements()[i].tolist() == [code - zero for code in codes], f"{name}: elements"


def test_means_do_not_depend_on_order():
    """Of 2^14 magnitudes over 20 powers of two, whose float32 sums do."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2**14, generator=generator) * torch.rand(2**14, generator=generator).mul(20).exp2()
    orders = [torch.randperm(len(x), generator=generator) for _ in range(8)]
    assert len({np.cumsum(x[order].abs().numpy())[-1] for order in orders}) > 1, "this sample cannot tell"
    for shape in ((1, -1), (128, 128), (-1, 1)):
        found = {quantize(x[order].view(shape), absmean("ternary", "tensor")).scales.item() for order in orders}
        assert len(found) == 1, f"{shape}: {found}"


@each("element", INTEGERS)
def test_the_largest_numbers_do_not_overflow(element):
    """Where least and largest are further apart than float32 reaches they may saturate, but keep their signs."""
    ends = ((0.0, 3e38), (-3e38, 0.0), (-1.6e38, 1.7e38), (-1e38, 3e38), (-3e38, 3e38), (-FLOAT32_MAX, 3e38))
    for block, (low, high) in itertools.product((8, "row", "tensor"), ends):
        x = torch.tensor([[low, high, low / 3, high / 3, 0.0]])
        found = quantize(x, minmax(element, block))
        values, step = found.dequantize(), float_scales(found).max().item()
        message = f"{element}, block {block}: {x.tolist()} became {values.tolist()}"
        assert math.isfinite(step), f"{message}, scale {step}"
        assert values.isfinite().all(), message
        same(values.sign()[:, [0, 1, 4]], x.sign()[:, [0, 1, 4]], message)
        if max(-low, high) < FLOAT32_MAX / 2:
            assert ((values - x).abs() <= step / 2 * (1 + 1e-5)).all(), message


@each("element", INTEGERS)
def test_the_smallest_numbers_do_not_divide_by_zero(element):
    for size in (2.0**-149, 2.0**-140, 2.0**-126, 1e-37):
        x = torch.tensor([[-size, 3 * size, 0.0, size]])
        found = quantize(x, minmax(element, "row"))
        values, step = found.dequantize(), float_scales(found).item()
        assert math.isfinite(step), f"{element}, {size}: scale {step}"
        assert ((values - x).abs() <= step / 2 * (1 + 1e-5)).all(), f"{element}: {x.tolist()} became {values.tolist()}"
