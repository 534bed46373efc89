"""Smoothing factors: powers of two that bring a largest magnitude into (1/2, 1]."""

import itertools
import math

import pytest
import torch

from lightning_lowbit.quant import amax_along, smoothing_factor
from tests.quant.tensors import same
from tests.tables import each

FLOAT32 = torch.finfo(torch.float32)
LIMITS = {torch.float32: 64, torch.bfloat16: 64, torch.float16: 14}  # of the exponents of factors


def definition(amax, limit):
    """The largest power of two within 2^±limit with s * amax <= 1."""
    if not 0 < amax < math.inf:  # NaN too
        return 1.0
    return next((2.0**k for k in range(limit, -limit, -1) if 2.0**k * amax <= 1), 2.0**-limit)


def magnitudes():
    """All binades of float32 and beside them, subnormal numbers, and random ones."""
    powers = torch.tensor([2.0**k for k in range(-149, 128)])
    beside = [torch.nextafter(powers, torch.full_like(powers, towards)) for towards in (0.0, torch.inf)]
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(30).exp2()
    return torch.cat([powers, *beside, drawn, torch.tensor([0.0, FLOAT32.max, torch.inf, torch.nan])])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_factors_by_definition(dtype):
    amax = magnitudes()
    found = smoothing_factor(amax, dtype)
    assert found.dtype == dtype
    same(found.float(), torch.tensor([definition(one, LIMITS[dtype]) for one in amax.tolist()]), f"factors in {dtype}")


def test_factors_are_float32_unless_told():
    assert smoothing_factor(torch.ones(3)).dtype == torch.float32


@each("shape", [(), (0,), (7,), (3, 1), (2, 3, 4)])
def test_any_shape(shape):
    amax = torch.rand(shape) + 0.1
    before = amax.clone()
    found = smoothing_factor(amax)
    assert found.shape == shape
    assert torch.equal(found.flatten(), smoothing_factor(amax.flatten()))
    assert torch.equal(amax, before), "amax was changed"


# --- the largest magnitude --------------------------------------------------------------------------------------------


@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@each("shape", [(5,), (1, 6), (6, 1), (4, 7), (2, 3, 4)])
def test_largest_along_a_dimension(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for layout, dim in itertools.product((x, x.mT.contiguous().mT if x.dim() > 1 else x), range(-x.dim(), x.dim())):
        found = amax_along(layout, dim)
        size = [1 if i == dim % x.dim() else n for i, n in enumerate(shape)]
        assert (found.dtype, list(found.shape)) == (torch.float32, size)
        expected = [max(map(abs, row)) for row in x.movedim(dim, -1).reshape(-1, shape[dim]).tolist()]
        assert torch.equal(found.flatten(), torch.tensor(expected)), f"along {dim}"


@each("shape", [(0,), (0, 4), (4, 0), (2, 0, 3), (0, 0)])
def test_largest_of_nothing(shape):
    for dim in range(-len(shape), len(shape)):
        found = amax_along(torch.ones(shape), dim)
        assert list(found.shape) == [1 if i == dim % len(shape) else n for i, n in enumerate(shape)]
        assert found.dtype == torch.float32
        assert not found.any()


def test_largest_shows_what_is_not_finite():
    x = torch.tensor([[1.0, -torch.inf], [torch.nan, 3.0], [-2.0, 0.5]])
    same(amax_along(x, 0), torch.tensor([[torch.nan, torch.inf]]), "along 0")
    same(amax_along(x, 1), torch.tensor([[torch.inf], [torch.nan], [2.0]]), "along 1")


def test_largest_leaves_its_argument_alone():
    x = torch.randn(4, 5)
    before = x.clone()
    for dim in (0, 1):
        found = amax_along(x, dim)
        assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(x, before)
    one = torch.tensor([[1.5]])
    assert amax_along(one, 0).untyped_storage().data_ptr() != one.untyped_storage().data_ptr(), "a view of its argument"
