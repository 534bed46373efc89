"""Histograms of codes; parts of tensors, devices, what is known of casts."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.metrics import cast_statistics, code_histogram, levels
from tests.metrics.cast_samples import CASTS, ZERO_POINTS, sample
from tests.tables import each


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


def test_minus_zero_is_zero():
    quantized = quantize(torch.full((1, 16), 6.0), CASTS[2])
    codes = torch.tensor([[0b0000, 0b1000] * 8], dtype=torch.uint8)
    histogram = code_histogram(replace(quantized, codes=codes))
    assert histogram.tolist() == [0] * 7 + [16] + [0] * 7


def test_histogram_of_nothing():
    quantized = quantize(torch.full((1, 16), math.nan), CASTS[0])
    assert code_histogram(quantized).sum() == 0
    assert code_histogram(quantized, normalize=True).tolist() == [0.0] * 15


@each("cast", [*CASTS, *ZERO_POINTS[:3]])
def test_errors_of_parts_add_up(cast):
    x = sample(24, 64)
    amax = x.abs().amax() if cast.scale.needs_amax else None
    whole = cast_statistics(x, cast)
    parts = [cast_statistics(part, cast, amax=amax) for part in x.split(8)]
    total = parts[0] + parts[1] + parts[2]
    assert total.floats() == pytest.approx(whole.floats(), rel=1e-12)
    assert total.codes.tolist() == whole.codes.tolist()
    assert total.elements == 24 * 64
    assert total.cast == cast


def test_errors_of_different_casts_do_not_add_up():
    x = sample(8, 64)
    with pytest.raises(ValueError, match="Errors of one cast add up; got those of e2m1/e4m3:1x16.* and e2m1/e8m0"):
        cast_statistics(x, CASTS[0]) + cast_statistics(x, CASTS[3])


@each("cast", [*CASTS, *ZERO_POINTS])
def test_nothing_waits_for_the_device(cast):
    """Tensors without data: whoever asked one for its value would fail."""
    error = cast_statistics(torch.empty(8, 64, device="meta"), cast)
    for name in ("sqnr", "mse", "relative_mse", "bias", "underflow", "saturation", "not_finite"):
        value = getattr(error, name)
        assert value.device.type == "meta"
        assert value.shape == ()
    assert error.codes.shape == (len(levels(cast.grid)),)


def test_no_gradient_is_recorded():
    assert not cast_statistics(torch.randn(4, 16, requires_grad=True), CASTS[0]).sqnr.requires_grad


def test_what_quantize_refuses():
    with pytest.raises(ValueError, match="takes a floating point tensor"):
        cast_statistics(torch.ones(4, 16, dtype=torch.int64), CASTS[0])
    with pytest.raises(ValueError, match="needs a key"):
        cast_statistics(torch.ones(4, 16), replace(CASTS[0], rounding="stochastic"))


def test_the_old_spelling_of_normalize_is_deprecated():
    quantized = quantize(torch.randn(4, 16), Cast("e2m1", {"block": 16}))
    with pytest.warns(DeprecationWarning, match="normalize="):
        old = code_histogram(quantized, normalise=True)
    assert old.equal(code_histogram(quantized, normalize=True))
    with pytest.raises(TypeError, match="unexpected keyword argument 'normed'"):
        code_histogram(quantized, normed=True)
