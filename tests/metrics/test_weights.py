"""Shares, flips and distances are what loops over elements say, and what is known of normally distributed weights."""

import itertools
import math

import pytest
import torch

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.metrics import (
    expected_zeros,
    flip_rate,
    flipped,
    is_ternary,
    levels,
    ternary_shares,
    threshold_distance,
)
from tests.metrics.activations import normal
from tests.metrics.cast_samples import unit_of
from tests.tables import each

TERNARY = Cast("ternary", Scale("fp32", "tensor", statistic="absmean"))
ZERO_POINT = Cast("int4", Scale("fp32", 16, statistic="minmax"))


@each("factor, zeros", [(math.sqrt(3) / 2, 0.270), (1.0, 0.310), (2 / math.sqrt(3), 0.355)])
def test_zeros_that_are_expected(factor, zeros):
    assert expected_zeros(factor) == pytest.approx(zeros, abs=5e-4)
    cast = TERNARY.replace(scale={"factor": factor})
    minus, found, plus = ternary_shares(quantize(3 * normal(255, 256), cast)).tolist()
    assert found == pytest.approx(expected_zeros(factor), abs=6e-3), "normally distributed weights have other shares"
    assert minus == pytest.approx(plus, abs=8e-3)


@each("factor", [0.0, -1.0, math.nan])
def test_a_factor_is_positive(factor):
    with pytest.raises(ValueError, match=f"a positive number; got {factor}"):
        expected_zeros(factor)


def test_which_casts_are_ternary():
    symmetric = {name for name in ELEMENT_FORMATS if is_ternary(Cast(name, Scale("fp32", 16)))}
    assert symmetric == {"ternary", "int2"}
    assert not is_ternary(Cast("int2", Scale("fp32", 16, statistic="minmax"))), "it has levels from -3 to 3"


@each("cast", [TERNARY, Cast("int2", Scale("fp32", "row"))])
def test_shares_by_hand(cast):
    shares = ternary_shares(quantize(torch.tensor([[2.0, -2.0, 0.1, 2.0], [2.0, 0.0, -0.1, 2.0]]), cast))
    assert shares.dtype == torch.float32
    assert shares.tolist() == [1 / 8, 3 / 8, 4 / 8]
    bad = torch.tensor([[2.0, -2.0, 0.0, 2.0], [2.0, math.nan, -2.0, -2.0]])  # a NaN takes its block with it
    rest = [0.0, 0.0, 0.0] if cast is TERNARY else [1 / 4, 1 / 4, 2 / 4]
    assert ternary_shares(quantize(bad, cast)).tolist() == rest


@each("cast", [Cast("int4", Scale("fp32", 16)), ZERO_POINT])
def test_shares_of_other_levels(cast):
    with pytest.raises(ValueError, match=r"has other levels than -1, 0 and 1: take code_histogram"):
        ternary_shares(quantize(normal(4, 16), cast))


@each("cast", [TERNARY, Cast("e2m1", Scale("e4m3", 16, two_level=True)), ZERO_POINT])
def test_flips_equal_counting(cast):
    x = normal(8, 48)
    before, after = quantize(x, cast), quantize(x + 0.2 * normal(8, 48, seed=1), cast)
    pairs = zip(before.elements().flatten().tolist(), after.elements().flatten().tolist(), strict=True)
    expected = [a != b for a, b in pairs]
    assert 0 < sum(expected) < len(expected), "the sample does not test what it should"
    assert flipped(before, after).flatten().tolist() == expected
    assert flip_rate(before, after).item() == pytest.approx(sum(expected) / len(expected))
    assert flip_rate(before, quantize(4 * x, cast)) == 0, "a scale that changes is no flip"


def test_a_zero_point_that_moves_is_no_flip():
    """The least element goes from -3 to -5 and the largest from 12 to 10: each code is two more than before."""
    x = torch.tensor([[-3.0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 12]])
    y = x.clone()
    y[0, 0], y[0, -1] = -5, 10
    before, after = quantize(x, ZERO_POINT), quantize(y, ZERO_POINT)
    assert (before.codes != after.codes).sum() == 14, "the sample does not test what it should"
    assert flipped(before, after).nonzero().tolist() == [[0, 0], [0, 15]]


def test_flips_of_different_things():
    one, other = quantize(normal(4, 16), TERNARY), quantize(normal(4, 16), ZERO_POINT)
    with pytest.raises(ValueError, match=r"got \(4, 16\) by ternary.* and \(4, 16\) by int4"):
        flip_rate(one, other)
    with pytest.raises(ValueError, match=r"got \(4, 16\) by .* and \(4, 8\) by"):
        flip_rate(one, quantize(normal(4, 8), TERNARY))
    assert flip_rate(quantize(normal(0, 16), ZERO_POINT), quantize(normal(0, 16), ZERO_POINT)).isnan()


CASTS = [
    TERNARY,
    Cast("ternary", Scale("fp32", "row", statistic="absmean", factor=0.6)),
    Cast("int4", Scale("fp32", 24)),
    Cast("int8", Scale("fp32", "tensor")),
    Cast("e2m1", Scale("e4m3", 16, two_level=True)),
    Cast("e2m1", Scale("e4m3", (4, 16), two_level=True)),
    Cast("e2m1", Scale("e4m3", 16, two_level=True, four_over_six="mse")),
    Cast("e2m1", Scale("e8m0", 32, "floor", prescale=0.75)),
    Cast("e3m0", Scale("e8m0", 32)),
    Cast("e4m3", Scale("fp32", "tensor")),
    ZERO_POINT,
    Cast("int2", Scale("fp32", "row", statistic="minmax")),
    Cast("int8", Scale("fp32", "tensor", statistic="minmax")),
]


def slow_distance(x, cast):
    """By a loop over elements and thresholds, in Python's floats from scales as they are stored."""
    quantized = quantize(x, cast)
    total = 0.0
    for row, column in itertools.product(*map(range, x.shape)):
        place, unit = unit_of(quantized, row, column)
        values = levels(cast.format)
        if quantized.zero_points is not None:
            values = tuple(code - quantized.zero_points[place].item() for code in range(2**cast.format.bits))
        thresholds = [(a + b) / 2 for a, b in itertools.pairwise(values)]
        element = x[row, column].item() / unit
        total += min(abs(element - threshold) for threshold in thresholds)
    return total / x.numel()


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_distance_equals_a_loop(cast, dtype):
    x = normal(5, 40, dtype=dtype) + 0.3
    found = threshold_distance(x, cast)
    assert (found.dtype, found.shape) == (torch.float32, ())
    assert found.item() == pytest.approx(slow_distance(x, cast), rel=1e-5)
    if not isinstance(cast.scale.block, tuple):
        assert threshold_distance(x.t(), cast, dim=0).item() == pytest.approx(found.item(), rel=1e-6)
        assert threshold_distance(x.t(), cast, dim=-2).item() == pytest.approx(found.item(), rel=1e-6)


def test_distance_by_an_amax_from_outside():
    cast = Cast("int4", Scale("fp32", "tensor", source="delayed"))
    x = torch.tensor([[1.0, 2.25, -3.0]])
    assert threshold_distance(x, cast, amax=torch.tensor(7.0)).item() == pytest.approx((0.5 + 0.25 + 0.5) / 3)
    assert threshold_distance(x, cast, amax=torch.tensor(3.5)).item() == pytest.approx((0.5 + 0.0 + 0.5) / 3, abs=1e-6)


@each("value", [math.nan, math.inf])
def test_distance_leaves_out_what_is_no_number(value):
    cast = Cast("int4", Scale("fp32", 8))
    x = normal(2, 16)
    x[0, 0] = value
    rest = torch.cat([x[0, 8:], x[1]])[None]
    assert threshold_distance(x, cast).item() == pytest.approx(threshold_distance(rest, cast).item(), rel=1e-6)
    assert threshold_distance(x[:, :8][:1], cast).isnan()


def test_distance_leaves_out_a_scale_that_underflows():
    cast = Cast("e2m1", Scale("e4m3", 16, two_level=True))
    x = normal(2, 16)
    tiny = torch.cat([x, torch.full((1, 16), 1e-7)])
    assert quantize(tiny, cast).scales[2].float() == 0, "the sample does not test what it should"
    assert threshold_distance(tiny, cast).item() == pytest.approx(threshold_distance(x, cast).item(), rel=1e-6)
    assert threshold_distance(torch.zeros(2, 16), cast).item() == 0.25, "zeros are the center of their bin"


def test_what_has_no_thresholds():
    with pytest.raises(ValueError, match=r"Thresholds are those of rounding to nearest, and int4.*~ rounds stochast"):
        threshold_distance(normal(4, 16), Cast("int4", Scale("fp32", 16), "stochastic"))
    with pytest.raises(ValueError, match=r"takes a matrix; got a tensor of shape \(2, 4, 16\)"):
        threshold_distance(normal(2, 4, 16), TERNARY)


@each("cast", [TERNARY, ZERO_POINT, CASTS[4]])
def test_nothing_waits_for_the_device(cast):
    """Tensors without data: whoever asked one for its value would fail."""
    x = torch.empty(8, 64, device="meta", requires_grad=True)
    quantized = quantize(x.detach(), cast)
    found = [flip_rate(quantized, quantized), threshold_distance(x, cast)]
    if is_ternary(cast):
        found.extend(ternary_shares(quantized))
    assert all(value.device.type == "meta" and value.shape == () for value in found)
    assert not any(value.requires_grad for value in found)
