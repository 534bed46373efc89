"""Signal and noise are those of the gradients that the draws were made from."""

import math

import pytest
import torch

from lightning_lowbit.metrics import gradient_noise_sums, gradient_to_noise
from tests.tables import each


def draws(gradient, sigma, count):
    """Sums of pairs, ``[count, 2]``."""
    generator = torch.Generator().manual_seed(7)

    def draw():
        return gradient + sigma * torch.randn(gradient.shape, generator=generator)

    return torch.stack([gradient_noise_sums(draw(), draw()) for _ in range(count)])


@each(
    "first, second, dtype, sums",
    [
        ([3.0, -1.0, 0.5, 2.0], [1.0, 1.0, 0.5, -2.0], torch.float32, [(4 + 4 + 0 + 16) / 2, 3 - 1 + 0.25 - 4]),
        ([256.0] * 3, [255.0] * 3, torch.bfloat16, [1.5, 3 * 256 * 255]),  # added up in float32
        ([256.0] * 3, [255.0] * 3, torch.float16, [1.5, 3 * 256 * 255]),
        ([3e-25] * 4, [1e-25] * 4, torch.float32, [8e-50, 12e-50]),  # squares below what float32 holds
    ],
)
def test_sums_by_hand(first, second, dtype, sums):
    found = gradient_noise_sums(torch.tensor(first, dtype=dtype), torch.tensor(second, dtype=dtype))
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(sums, rel=1e-6, abs=0)


@each("sigma", [0.1, 1.0, 5.0])
def test_both_are_unbiased(sigma):
    """Over 400 pairs means scatter by 1/20 of a pair's deviation; four of those are allowed."""
    gradient = torch.linspace(-1, 1, 500)
    sums = draws(gradient, sigma, 400)
    error = 4 * sums.std(0) / math.sqrt(len(sums))
    assert ((sums.mean(0) - torch.tensor([sigma**2 * 500, gradient.square().sum()])).abs() < error).all()
    expected = float(gradient.norm()) / (sigma * math.sqrt(500))
    assert float(gradient_to_noise(sums)) == pytest.approx(expected, rel=0.15)


def test_without_a_gradient_the_signal_has_either_sign_and_the_ratio_is_no_lower_than_0():
    sums = draws(torch.zeros(100), 1.0, 200)
    assert 0.3 < float((sums[:, 1] > 0).double().mean()) < 0.7
    ratios = torch.stack([gradient_to_noise(pair[None]) for pair in sums])
    assert torch.equal(ratios == 0, sums[:, 1] <= 0)


def test_squares_are_averaged_before_the_root_in_each_place():
    sums = torch.tensor([[[1.0, 4.0], [0.0, 1.0], [2.0, -1.0]], [[3.0, -2.0], [0.0, 3.0], [2.0, 0.5]]])
    assert gradient_to_noise(sums).tolist() == pytest.approx([math.sqrt(2 / 4), math.inf, 0.0])


@each("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_left_out(bad):
    broken = gradient_noise_sums(torch.tensor([1.0, bad]), torch.ones(2))
    assert not bool(broken.isfinite().all())
    good = torch.tensor([1.0, 9.0], dtype=torch.float64)
    assert float(gradient_to_noise(torch.stack([broken, good]))) == 3
    assert math.isnan(float(gradient_to_noise(broken[None])))


def test_two_shapes_are_refused():
    with pytest.raises(ValueError, match=r"one shape; got \(2,\) and \(3,\)"):
        gradient_noise_sums(torch.ones(2), torch.ones(3))
