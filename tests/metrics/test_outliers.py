"""Outlier statistics are what their definitions say, eager and compiled, of parts and of the whole."""

import math

import pytest
import torch

from lightning_lowbit.compilation import backend
from lightning_lowbit.metrics.outliers import activation_sums, kurtosis, outlier_share
from tests.metrics.activations import activation_outliers
from tests.tables import each


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def defined(x, k):
    """Amaxes of channels, kurtosis and share as they are defined, in float64."""
    x = x.double().flatten(0, -2)
    central = x - x.mean()
    beyond = (x.abs() > k * x.square().mean().sqrt()).double().mean()
    return x.abs().amax(0), central.pow(4).mean() / central.square().mean() ** 2, beyond


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("leading", [(300,), (3, 70), (1,)])
def test_equals_its_definition(leading, dtype):
    check(leading, dtype, "eager")


@pytest.mark.slow
def test_compiled_equals_its_definition():
    for leading in ((300,), (3, 70)):
        check(leading, torch.bfloat16, "compiled")


def check(leading, dtype, name):
    x = normal(*leading, 40, dtype=dtype) * 0.3 + 0.1
    x[..., 7] *= 30
    with backend(name):
        found = activation_outliers(x, 2.5)
    amax, fourth, share = defined(x, 2.5)
    assert found.channel_amax.equal(amax.float())
    torch.testing.assert_close(found.kurtosis.double(), fourth, rtol=2e-5, atol=0)
    torch.testing.assert_close(found.outliers.double(), share, rtol=1e-6, atol=0)
    assert 0 < share < 0.1, "the sample has no outliers"


def test_an_outlier_among_many():
    x = torch.zeros(100, 10)
    x[3, 4] = -5.0
    found = activation_outliers(x)
    assert found.channel_amax.tolist() == [0, 0, 0, 0, 5, 0, 0, 0, 0, 0]
    assert found.outliers.item() == pytest.approx(1e-3)
    assert found.kurtosis.item() == pytest.approx(1000, rel=0.01)


def test_parts_add_up():
    x = torch.cat([normal(40, 16), 3 * normal(60, 16, seed=1) + 1])
    parts = [activation_sums(part, 6.0) for part in (x[:40], x[40:])]
    sums, amax = parts[0][0] + parts[1][0], torch.maximum(parts[0][1], parts[1][1])
    whole, whole_amax = activation_sums(x, 6.0)
    torch.testing.assert_close(sums[:5], whole[:5], rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(kurtosis(sums), defined(x, 6.0)[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(kurtosis(3 * sums), kurtosis(sums), rtol=1e-12, atol=0)
    assert outlier_share(torch.stack([sums, whole])).shape == (2,)
    assert amax.equal(whole_amax)
    assert sums.dtype == torch.float64


@pytest.mark.fast("eager")
@pytest.mark.parametrize("name", ["eager", "compiled"])
def test_what_is_not_finite(name):
    for value, bad in ((math.nan, math.isnan), (math.inf, math.isinf)):
        x = normal(20, 8).bfloat16()
        x[5, 2] = value
        with backend(name):
            found = activation_outliers(x)
        assert bad(found.channel_amax[2].item())
        assert found.channel_amax[[0, 1, 3, 4, 5, 6, 7]].isfinite().all(), "other channels are"
        assert found.kurtosis.isnan()
        assert found.outliers.isnan()


def test_nothing_and_nothing_but_one_number():
    for x in (torch.zeros(0, 4), torch.zeros(2, 0, 4)):
        empty = activation_outliers(x)
        assert empty.channel_amax.tolist() == [0] * 4
        assert empty.kurtosis.isnan()
        assert empty.outliers.isnan()
    for number in (0.0, 0.1, -7.0):
        found = activation_outliers(torch.full((30, 4), number))
        assert found.kurtosis.isnan(), "what does not vary has no kurtosis"
        assert found.outliers.item() == 0
    assert activation_outliers(torch.arange(1.0, 5.0)).channel_amax.tolist() == [1, 2, 3, 4], "a vector is one token"


def test_views_and_gradients():
    x = normal(6, 5, 8).requires_grad_()
    for view in (x, x.transpose(0, 1), x[::2], x[..., ::2], x.mT):
        found = activation_outliers(view, 1.5)
        amax, fourth, share = defined(view.detach(), 1.5)
        assert not found.kurtosis.requires_grad
        assert found.channel_amax.equal(amax.float())
        torch.testing.assert_close(found.kurtosis.double(), fourth, rtol=1e-5, atol=0)
        torch.testing.assert_close(found.outliers.double(), share)
