"""What stands for the derivative of rounding, by hand."""

import itertools

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


@each("element", ["e2m1", "int4", "e1m2", "e3m0"])
def test_dge_is_the_clipped_derivative_of_a_smooth_step(element):
    """With t from -1 at a level to 1 at the next: |t|^(1/5 - 1) / 5, at most 3; beyond the largest level 1/5."""
    levels = torch.from_numpy(reference.magnitudes(element)).float()
    t = torch.linspace(-1, 1, 65)[:-1]
    values = (levels[:-1, None] + (t + 1) / 2 * (levels[1:] - levels[:-1])[:, None]).flatten()
    expected = (t.abs() ** (1 / 5 - 1) / 5).clamp(max=3).repeat(len(levels) - 1)
    beyond = torch.tensor([levels[-1], levels[-1] * 1.01, levels[-1] * 100])
    values, expected = torch.cat([values, beyond]), torch.cat([expected, torch.full((3,), 1 / 5)])
    for sign in (1, -1):
        torch.testing.assert_close(factor("dge", sign * values, element), expected)


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
