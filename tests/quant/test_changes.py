"""Means, and smoothing factors: powers of two that bring a largest magnitude into (1/2, 1]."""

import math

import numpy as np
import pytest
import torch

from lightning_lowbit.quant import amax_along, smoothing_factor, split_mean
from tests.quant.tensors import same
from tests.tables import each

LIMITS = {torch.float32: 64, torch.bfloat16: 64, torch.float16: 14}  # of the exponents of factors


# --- the mean over rows -----------------------------------------------------------------------------------------------


@each("dtype", [torch.float32, torch.bfloat16])
@each("shape", [(1, 5), (64, 48), (4097, 3)])
def test_split_mean(shape, dtype):
    """Rest and mean add up to x, and the rest has no mean, up to one rounding each."""
    x = (torch.randn(shape) + torch.linspace(-3, 3, shape[1])).to(dtype)
    before = x.clone()
    rest, mean = split_mean(x)
    assert (rest.dtype, mean.dtype) == (dtype, torch.float32)
    assert (rest.shape, mean.shape) == (x.shape, (1, shape[1]))
    torch.testing.assert_close(mean.double(), x.double().mean(0, keepdim=True), rtol=1e-5, atol=1e-6)
    unit = torch.finfo(dtype).eps * float(x.abs().max())
    assert (rest.double() + mean - x.double()).abs().max() <= unit, "rest + mean is not x"
    # Each of n roundings is off by half a unit at most, as good as independently; that of the mean counts n times.
    bound = 4 * unit * shape[0] ** 0.5 + shape[0] * torch.finfo(torch.float32).eps * float(x.abs().max())
    assert (rest.double().sum(0).abs() <= bound).all(), "the rest has a mean"
    same(x, before, "the input was changed")


@each("shape", [(0, 5), (3, 0), (0, 0)])
def test_the_mean_of_nothing(shape):
    rest, mean = split_mean(torch.empty(shape))
    assert rest.shape == shape
    same(mean, torch.zeros(1, shape[1]), "the mean of no rows")


def test_a_mean_of_what_is_not_finite():
    x = torch.ones(4, 3)
    x[1, 0], x[2, 1] = torch.inf, torch.nan
    rest, mean = split_mean(x)
    assert rest[:, 2].isfinite().all(), "the damage leaves its column"
    assert not rest[1, 0].isfinite(), "an infinity became finite"
    assert not mean[0, :2].isfinite().any(), "the mean hides what is not finite"


# --- smoothing --------------------------------------------------------------------------------------------------------


def definition(amax, limit):
    """The largest power of two within 2^±limit with s * amax <= 1."""
    if not 0 < amax < math.inf:  # NaN too
        return 1.0
    return next((2.0**k for k in range(limit, -limit, -1) if 2.0**k * amax <= 1), 2.0**-limit)


@each("dtype", LIMITS)
def test_factors_by_definition(dtype):
    """Of all binades of float32 and beside them, subnormal numbers, and random ones."""
    powers = torch.tensor([2.0**k for k in range(-149, 128)])
    beside = [torch.nextafter(powers, torch.full_like(powers, towards)) for towards in (0.0, torch.inf)]
    drawn, ends = torch.randn(1000).mul(30).exp2(), [0.0, torch.finfo(torch.float32).max, torch.inf, torch.nan]
    amax = torch.cat([powers, *beside, drawn, torch.tensor(ends)])
    found = smoothing_factor(amax, dtype)
    assert found.dtype == dtype
    same(found.float(), torch.tensor([definition(one, LIMITS[dtype]) for one in amax.tolist()]), f"factors in {dtype}")


@each("shape", [(), (0,), (7,), (3, 1), (2, 3, 4)])
def test_factors_of_any_shape(shape):
    amax = torch.rand(shape) + 0.1
    before, found = amax.clone(), smoothing_factor(amax)
    assert (found.shape, found.dtype) == (shape, torch.float32)
    assert torch.equal(found.flatten(), smoothing_factor(amax.flatten()))
    assert torch.equal(amax, before), "amax was changed"


# --- the largest magnitude --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's words on NaN
@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@each("shape", [(5,), (1, 6), (6, 1), (4, 7), (2, 3, 4), (1, 1), (0,), (0, 4), (4, 0), (2, 0, 3), (0, 0)])
def test_largest_along_a_dimension(shape, dtype):
    x = torch.randn(shape).to(dtype)
    damaged = torch.where(x > 0.5, torch.nan, torch.where(x < -0.5, -torch.inf, x))
    for values in (x, damaged, x.mT.contiguous().mT if x.dim() > 1 else x):
        before = values.clone()
        for dim in range(-x.dim(), x.dim()):
            found = amax_along(values, dim)
            expected = np.abs(values.float().numpy()).max(axis=dim, initial=0, keepdims=True)
            assert found.dtype == torch.float32
            same(found, torch.from_numpy(expected), f"along {dim}")
            found.zero_()  # which leaves the argument alone
        same(values, before, "the input was changed")
