"""Splitting off the mean over rows."""

import pytest
import torch

from lightning_lowbit.quant import split_mean
from tests.quant.tensors import same
from tests.tables import each


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


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty(shape):
    rest, mean = split_mean(torch.empty(shape))
    assert rest.shape == shape
    same(mean, torch.zeros(1, shape[1]), "the mean of no rows")


def test_what_is_not_finite_stays_so():
    x = torch.ones(4, 3)
    x[1, 0], x[2, 1] = torch.inf, torch.nan
    rest, mean = split_mean(x)
    assert rest[:, 2].isfinite().all(), "the damage leaves its column"
    assert not rest[1, 0].isfinite(), "an infinity became finite"
    assert not mean[0, :2].isfinite().any(), "the mean hides what is not finite"
