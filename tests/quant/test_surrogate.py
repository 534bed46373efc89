"""What stands for the derivative of rounding, by hand."""

import itertools

import numpy as np
import pytest
import torch

from lightning_lowbit import Cast, Scale
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.quant import SURROGATES, quantize_operand, surrogate_factor, through_rounding
from tests.quant.tensors import NVFP4, casts, same, sample
from tests.references import quantize as reference
from tests.tables import each


def factor(kind, values, element):
    """The factors of elements that are these values in units of their scale."""
    cast = Cast(element, Scale("fp32", "tensor"))
    x = torch.as_tensor(values, dtype=torch.float32).reshape(1, -1)
    return surrogate_factor(kind, x, cast, -1, torch.tensor(ELEMENT_FORMATS[element].max))[0]


# --- trust ------------------------------------------------------------------------------------------------------------


# The largest level and half the step at it: 6 + 1, 7 + 1/2 ...
@each(
    ("element", "last"),
    [("e2m1", 7.0), ("int4", 7.5), ("int8", 127.5), ("e3m0", 24.0), ("e4m3", 464.0), ("ternary", 1.5), ("e1m2", 1.875)],
)
def test_trust_ends_half_a_step_beyond_the_largest_level(element, last):
    beyond = torch.nextafter(torch.tensor(last), torch.tensor(torch.inf)).item()
    largest = ELEMENT_FORMATS[element].max
    found = factor("trust", [last, -last, beyond, -beyond, largest, 0.0, 1e30], element)
    assert found.tolist() == [1, 1, 0, 0, 1, 1, 0], element


def test_trust_follows_the_scales():
    """floor gives 7.5 and 5 the scale 1, of which only 7.5 lies beyond 7; rceil gives 7.5 the scale 2."""
    x = torch.tensor([[7.5, 5.0, -7.0], [-2.0, 0.1, 0.0]])
    for rule, expected in (("floor", [[0, 1, 1], [1, 1, 1]]), ("rceil", [[1, 1, 1], [1, 1, 1]])):
        found = surrogate_factor("trust", x, Cast("e2m1", Scale("e8m0", 32, rule)), -1)
        assert found.tolist() == expected, rule
        assert found.dtype == torch.float32


def test_nothing_saturates_under_scales_rounded_up():
    x = sample(16, 64)
    for scale in (Scale("e4m3", rounding="up", two_level=True), Scale("fp32", "row"), Scale("e8m0", 32)):
        assert surrogate_factor("trust", x, Cast("e2m1", scale), -1).all(), f"{scale}"


# --- dge --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ["e2m1", "int4", "e1m2", "e3m0"])
def test_dge_at_levels_and_between(element):
    levels = torch.from_numpy(reference.magnitudes(element)).float()
    middles = (levels[1:] + levels[:-1]) / 2
    same(factor("dge", levels, element), torch.full_like(levels, 1 / 5), f"{element}: at levels 1/k")
    same(factor("dge", middles, element), torch.full_like(middles, 3.0), f"{element}: in the middle, clipped to 3")
    quarters = (3 * levels[1:] + levels[:-1]) / 4
    expected = torch.full_like(quarters, 0.5 ** (1 / 5 - 1) / 5)
    torch.testing.assert_close(factor("dge", quarters, element), expected, msg=f"{element}: at 3/4 of a step")
    beyond = [levels[-1] * 1.01, levels[-1] * 100]
    assert factor("dge", beyond, element).tolist() == pytest.approx([1 / 5] * 2), f"{element}: beyond the largest level"


@pytest.mark.parametrize("element", ["e2m1", "int4"])
def test_dge_is_symmetric(element):
    levels = torch.from_numpy(reference.magnitudes(element)).float()
    step = (levels[1:] - levels[:-1])[:, None]
    offsets = torch.linspace(1 / 64, 31 / 64, 31) * step
    up, down = (
        factor("dge", part.flatten(), element) for part in (levels[:-1, None] + offsets, levels[1:, None] - offsets)
    )
    torch.testing.assert_close(up, down, msg=f"{element}: not symmetric about the middle of a step")
    values = torch.cat([levels, (levels[:-1, None] + offsets).flatten()])
    same(factor("dge", -values, element), factor("dge", values, element), f"{element}: not symmetric about 0")


@pytest.mark.parametrize("element", ["e2m1", "int4"])
def test_dge_over_a_step(element):
    """Of the derivative of a smooth step from level to level the mean would be 1; clipping at 3 takes the peak.

    With t = |2 r - 1| the factor is t^(-4/5) / 5 down to t0 = 15^(-5/4), where it is 3, and 3 below: the mean over a
    step is 3 t0 + (1 - t0^(1/5)) = 0.593.
    """
    levels = torch.from_numpy(reference.magnitudes(element)).float()
    place = (torch.arange(4096) + 0.5) / 4096
    found = factor("dge", (levels[:-1, None] + place * (levels[1:] - levels[:-1])[:, None]).flatten(), element)
    t0 = 15 ** (-5 / 4)
    expected = 3 * t0 + 1 - t0 ** (1 / 5)
    assert expected == pytest.approx(0.593, abs=1e-3)
    means = found.view(len(levels) - 1, -1).double().mean(1)
    np.testing.assert_allclose(means, expected, rtol=1e-3, err_msg=f"{element}: mean over each step")
    assert found.max() == 3
    assert found.min() >= 1 / 5 - 1e-6


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.fast("dge")
@pytest.mark.parametrize("kind", SURROGATES)
def test_factors_are_those_of_the_scaled_elements(kind):
    """For every way of making scales, blocks along either dimension, sizes that do not fill them, bfloat16."""
    x = sample(13, 40).bfloat16()
    for block, dim in itertools.product((16, (16, 16), "row", "tensor"), (0, 1)):
        for cast in casts("e2m1", block)[::3]:
            scaled = reference.quantize(x.float(), cast, dim, field="scaled")
            counts = reference.quantize(x.float(), cast, dim, field="spread") != 0
            found = surrogate_factor(kind, x, cast, dim)
            expected = factor(kind, scaled.flatten(), "e2m1").view_as(x)
            assert (found.shape, found.dtype) == (x.shape, torch.float32)
            torch.testing.assert_close(
                found[counts], expected[counts], rtol=1e-4, atol=0, msg=f"{kind} of {cast}, {dim}"
            )


@pytest.mark.parametrize("kind", SURROGATES)
def test_a_gradient_through_rounding(kind):
    x, gradient = sample(8, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    amax = x.abs().max() / 4  # some elements saturate
    factors = surrogate_factor(kind, x, NVFP4, 0, amax)
    found = through_rounding(gradient, kind, x, NVFP4, 0, amax)
    assert len(factors.unique()) > 1
    assert found.dtype == torch.bfloat16
    same(found, (gradient.float() * factors).bfloat16(), "multiplied in float32, rounded once")


@pytest.mark.parametrize("kind", SURROGATES)
def test_rounding_is_the_derivative_of_nothing_else(kind):
    """amax is that of the quantizer: factors agree with what quantize_operand saturates."""
    x = torch.tensor([[8.0, 5.0, -7.5, 0.2]])
    cast, amax = Cast("e2m1", Scale("fp32", "tensor")), torch.tensor(6.0)
    values = quantize_operand(x, cast, -1, amax=amax).values
    found = surrogate_factor(kind, x, cast, -1, amax)
    assert values[0, :3].tolist() == [6, 4, -6]
    assert found[0, :3].tolist() == ([0, 1, 0] if kind == "trust" else pytest.approx([0.2, 3, 0.2]))


def test_an_unknown_surrogate():
    for call in (surrogate_factor, lambda *rest: through_rounding(torch.ones(1, 4), *rest)):
        with pytest.raises(ValueError, match="Unknown surrogate 'dgee'. Did you mean 'dge'.*'trust', 'dge'"):
            call("dgee", torch.ones(1, 4), Cast(), -1)
