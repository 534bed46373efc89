"""What a cast makes of a tensor: SQNR, underflow, saturation, histograms of codes; parts of tensors, and devices."""

import math
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.metrics import bias, cast_statistics, code_histogram, levels, mse, sqnr
from tests.metrics.cast_samples import CASTS, ZERO_POINTS, sample, unit_of
from tests.tables import each


def range_of(quantized, row, column):
    """What the scale of one element can express, least and largest, in Python's floats from what is stored."""
    block, unit = unit_of(quantized, row, column)
    if quantized.zero_points is None:
        return -unit * quantized.cast.format.max, unit * quantized.cast.format.max
    zero, top = quantized.zero_points[block].item(), 2**quantized.cast.format.bits - 1
    return -unit * zero, unit * (top - zero)


def slow(x, quantized):
    """The seven numbers by one loop over elements, in Python's floats."""
    q = quantized.dequantize()
    signal = noise = size = growth = 0.0
    nonzero = underflowed = saturated = 0
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            a, b = x[row, column].item(), q[row, column].item()
            least, largest = range_of(quantized, row, column)
            signal, noise, size = signal + a * a, noise + (a - b) ** 2, size + abs(a)
            growth += (b - a) * ((a > 0) - (a < 0))
            nonzero += a != 0
            underflowed += a != 0 and b == 0
            saturated += least < largest and (a < least * (1 + 1e-6) or a > largest * (1 + 1e-6))
    return {
        "sqnr": 10 * math.log10(signal / noise),
        "mse": noise / x.numel(),
        "relative_mse": noise / signal,
        "bias": growth / size,
        "underflow": underflowed / nonzero,
        "saturation": saturated / x.numel(),
        "not_finite": 0.0,
    }


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", [*CASTS, *ZERO_POINTS], ids=str)
def test_numbers_of_a_cast_equal_a_loop(cast, dtype):
    underflow = saturation = 0.0
    for seed in range(3):
        x = sample(9, 40, seed=seed, dtype=dtype)
        expected = slow(x, quantize(x, cast))
        found = cast_statistics(x, cast)
        assert found.floats() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        q = quantize(x, cast).dequantize()
        functions = {"sqnr": sqnr(x, q), "mse": mse(x, q), "relative_mse": mse(x, q, relative=True), "bias": bias(x, q)}
        for name, value in functions.items():
            assert value.item() == found.floats()[name], name
        underflow, saturation = underflow + expected["underflow"], saturation + expected["saturation"]
    assert underflow > 0, "the sample does not test underflow"
    saturates = cast.scale.format == "e4m3" or cast.scale.rounding == "floor" or cast.scale.statistic == "minmax"
    assert (saturation > 0) == saturates


@each("dim", [0, 1, -3])
def test_numbers_do_not_depend_on_where_blocks_lie(dim):
    x, cast = sample(8, 64), Cast("e2m1", Scale("e4m3", 16))
    turned = {0: x.t(), 1: x, -3: x.t().reshape(64, 2, 4)}[dim]
    assert cast_statistics(turned, cast, dim=dim).floats() == pytest.approx(cast_statistics(x, cast).floats(), rel=1e-9)


def test_numbers_by_hand():
    x = torch.tensor([[7.0, 3.4, -0.4, 0.0]])
    cast = Cast("int4", Scale("fp32", "tensor"))
    found = cast_statistics(x, cast)  # becomes 7, 3, 0, 0
    numbers = [10 * math.log10(60.72 / 0.32), 0.08, 0.32 / 60.72, -0.8 / 10.8, 1 / 3, 0.0, 0.0]
    assert [*found.floats().values()] == pytest.approx(numbers, rel=1e-6)
    assert found.codes.tolist() == [0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 1]
    late = cast_statistics(x, cast, amax=torch.tensor(3.5))  # a scale of 1/2 gives 3.5, 3.5, -0.5, 0
    assert late.floats()["saturation"] == 1 / 4
    assert late.floats()["bias"] == pytest.approx((-3.5 + 0.1 + 0.1) / 10.8, rel=1e-6)
    assert late.floats()["underflow"] == 0


@each("bits", [2, 3, 4, 8], fast=3)
def test_all_levels_on_either_side_of_a_zero_point(bits):
    """Rows with every whole number from -z to 2^bits - 1 - z, once, for every z there is."""
    steps = 2**bits - 1
    x = torch.arange(steps + 1) - torch.arange(steps + 1)[:, None].float()
    cast = Cast(f"int{bits}", Scale("fp32", "row", statistic="minmax"))
    histogram = code_histogram(quantize(x, cast))
    assert histogram.tolist() == [steps + 1 - abs(level) for level in range(-steps, steps + 1)]
    found = cast_statistics(x, cast)
    assert found.floats()["saturation"] == 0 and found.codes.equal(histogram)
    assert levels(cast.grid) == tuple(range(-steps, steps + 1))


@each("element", ["int4", "int8", "e2m1", "e4m3"])
@each("scale", [Scale("fp32", 16), Scale("fp32", "tensor"), Scale("e4m3", 128, two_level=True)])
def test_rounding_of_float32_scales_is_no_saturation(element, scale):
    """The largest element of a block is what its scale was made for, whatever the last bit says."""
    for seed in range(20):
        x = torch.randn(1, 128, generator=torch.Generator().manual_seed(seed))
        assert cast_statistics(x, Cast(element, scale)).floats()["saturation"] == 0


def test_a_scale_that_underflows_is_underflow_only():
    x = torch.full((2, 16), 1e-7)
    x[0] = 1.0
    x[1, 0] = 0
    error = cast_statistics(x, CASTS[0])
    assert quantize(x, CASTS[0]).scales[1].float() == 0, "the sample does not test what it should"
    assert error.floats()["underflow"] == 15 / 31
    assert error.floats()["saturation"] == 0
    assert error.codes.sum() == 32


@each("cast", CASTS)
def test_zeros_and_what_is_exact(cast):
    nothing = {"mse": 0.0, "relative_mse": 0.0, "bias": 0.0, "underflow": 0.0, "saturation": 0.0, "not_finite": 0.0}
    assert cast_statistics(torch.zeros(4, 32), cast).floats() == {"sqnr": math.inf, **nothing}
    ones = torch.ones(4, 32) * torch.tensor([1.0, -1.0]).repeat(16)
    if cast.scale.format != "e4m3":  # which does not hold 1/6
        assert cast_statistics(ones * cast.format.max, cast).floats() == {"sqnr": math.inf, **nothing}


def test_functions_at_their_limits():
    zero, one = torch.zeros(3), torch.ones(3)
    assert sqnr(zero, one) == -math.inf
    assert mse(zero, one) == 1
    assert mse(zero, one, relative=True) == math.inf
    assert sqnr(one, zero) == 0
    assert bias(one, zero) == -1, "all magnitude is lost"
    assert bias(torch.tensor([1.0, -3.0]), torch.tensor([2.0, -3.0])) == 0.25
    assert bias(torch.tensor([1.0, -3.0]), torch.tensor([0.0, -4.0])) == 0, "what one loses the other wins"
    tiny, huge = torch.full((3,), 1e-30), torch.full((3,), 1e30)
    for x in (tiny, huge):  # whose squares no float32 holds
        assert sqnr(x, 0.9 * x).item() == pytest.approx(20, rel=1e-5)
    assert sqnr(zero[:0], zero[:0]) == math.inf
    assert mse(zero[:0], zero[:0]).isnan()
    for function in (sqnr, mse, bias):
        with pytest.raises(ValueError, match=r"got \(3,\) and \(1, 3\)"):
            function(one, one[None])


@each("value", [math.nan, math.inf, -math.inf])
@each("cast", [CASTS[0], CASTS[3], CASTS[5], ZERO_POINTS[0]])
def test_elements_that_are_not_finite(cast, value):
    """They take their block with them, which then counts nowhere."""
    x, block = sample(4, 96), cast.scale.block
    x[0, 0] = value
    rest = x[:, block:] if cast.scale.two_level else torch.cat([x[0, block:], x[1:].flatten()])[None]
    numbers = cast_statistics(x, cast).floats()
    assert numbers["not_finite"] == block / 384
    assert all(math.isnan(numbers[name]) for name in ("sqnr", "mse", "relative_mse", "bias"))
    assert cast_statistics(x, cast).codes.sum() == 384 - block
    if not cast.scale.two_level:  # a scale of the tensor is another without that value
        found, expected = cast_statistics(x, cast), cast_statistics(rest, cast)
        assert found.underflowed == expected.underflowed
        assert found.saturated == expected.saturated
        assert found.codes.tolist() == expected.codes.tolist()


@each("name", ELEMENT_FORMATS)
def test_histogram_equals_counting(name):
    format = ELEMENT_FORMATS[name]
    values = levels(format)
    assert list(values) == sorted(set(values))
    assert list(values) == [-value for value in reversed(values)], "a level has no opposite"
    assert max(values) == format.max
    quantized = quantize(sample(16, 64), Cast(name, Scale("fp32", 16)))
    counts = Counter(format.decode(quantized.codes).flatten().tolist())
    histogram = code_histogram(quantized)
    assert histogram.dtype == torch.int64
    assert histogram.tolist() == [counts[value] for value in values]
    assert sum(counts.values()) == 16 * 64
    shares = code_histogram(quantized, normalize=True)
    torch.testing.assert_close(shares, histogram / 1024)


def test_levels_by_hand():
    assert levels(ELEMENT_FORMATS["e2m1"]) == (-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert levels(ELEMENT_FORMATS["int2"]) == levels(ELEMENT_FORMATS["ternary"]) == (-1, 0, 1)
    assert len(levels(ELEMENT_FORMATS["int8"])) == 255
    assert len(levels(ELEMENT_FORMATS["e4m3"])) == 253


def test_minus_zero_is_zero_and_nan_is_nothing():
    quantized = quantize(torch.full((1, 16), 6.0), CASTS[2])
    codes = torch.tensor([[0b0000, 0b1000] * 8], dtype=torch.uint8)
    assert code_histogram(replace(quantized, codes=codes)).tolist() == [0] * 7 + [16] + [0] * 7
    nothing = quantize(torch.full((1, 16), math.nan), CASTS[0])
    assert code_histogram(nothing).sum() == 0
    assert code_histogram(nothing, normalize=True).tolist() == [0.0] * 15


@each("cast", [*CASTS, *ZERO_POINTS[:3]])
def test_errors_of_parts_add_up(cast):
    x = sample(24, 64)
    amax = x.abs().amax() if cast.scale.needs_amax else None
    whole, parts = cast_statistics(x, cast), [cast_statistics(part, cast, amax=amax) for part in x.split(8)]
    total = parts[0] + parts[1] + parts[2]
    assert total.floats() == pytest.approx(whole.floats(), rel=1e-12)
    assert total.codes.tolist() == whole.codes.tolist()
    assert (total.elements, total.cast) == (24 * 64, cast)
    with pytest.raises(ValueError, match=f"Errors of one cast add up; got those of {re.escape(str(cast))} and int3"):
        total + cast_statistics(x, ZERO_POINTS[3])


@each("cast", [*CASTS, *ZERO_POINTS])
def test_nothing_waits_for_the_device(cast):
    """Tensors without data: whoever asked one for its value would fail. No gradient is recorded."""
    error = cast_statistics(torch.empty(8, 64, device="meta", requires_grad=True), cast)
    for name in ("sqnr", "mse", "relative_mse", "bias", "underflow", "saturation", "not_finite"):
        value = getattr(error, name)
        assert (value.device.type, value.shape, value.requires_grad) == ("meta", (), False)
    assert error.codes.shape == (len(levels(cast.grid)),)


def test_the_old_spelling_of_normalize_is_deprecated():
    quantized = quantize(torch.randn(4, 16), Cast("e2m1", {"block": 16}))
    with pytest.warns(DeprecationWarning, match="normalize="):
        old = code_histogram(quantized, normalise=True)
    assert old.equal(code_histogram(quantized, normalize=True))
    with pytest.raises(TypeError, match="unexpected keyword argument 'normed'"):
        code_histogram(quantized, normed=True)
