"""Spikes that were planted are found, and nothing else is."""

import math

import pytest
import torch

from lightning_lowbit.metrics import count_spikes
from tests.tables import each


def noise(steps=300, seed=0, size=0.05):
    generator = torch.Generator().manual_seed(seed)
    return (3 + size * torch.randn(steps, generator=generator, dtype=torch.float64)).tolist()


def decay(steps=300):
    return [2 + 5 * math.exp(-step / 60) for step in range(steps)]


def with_values(losses, values):
    return [values.get(step, loss) for step, loss in enumerate(losses)]


@each("seed", range(5))
@each("steps", [[100], [40, 150, 151, 290], [20], [299]])
def test_planted_spikes(seed, steps):
    """Neighbors are one spike; the first value with a full window before it may be one, and so may the last."""
    losses = noise(seed=seed)
    quiet = count_spikes(losses, threshold=8)
    assert quiet == 0
    found = count_spikes(with_values(losses, dict.fromkeys(steps, 6.0)), threshold=8)
    assert found == len([step for step in steps if step - 1 not in steps])


def test_a_run_of_high_values_is_one_spike_however_long():
    losses = with_values(noise(), {step: 6.0 - step / 1000 for step in range(100, 150)})
    assert count_spikes(losses, threshold=8) == 1


def test_a_spike_does_not_hide_the_next():
    """What jumped is not among the values that the next one is compared with."""
    losses = noise()
    for step in range(50, 290, 3):  # a third of all
        losses[step] = 6.0
    assert count_spikes(losses, threshold=8) == len(range(50, 290, 3))


def test_noise_is_rarely_a_spike():
    counts = [count_spikes(noise(1000, seed)) for seed in range(5)]
    assert sum(counts) <= 5 * 1000 * 0.003, f"too many of 1000 values each: {counts}"


@pytest.mark.parametrize("size", [0.003, 0.005, 0.01, 0.02])
def test_noise_in_rounded_losses_is_rarely_a_spike(size):
    """Logged in bfloat16, most losses are the same number, and the next larger one is no jump."""
    losses = torch.tensor(noise(size=size)).bfloat16().tolist()
    assert count_spikes(losses) <= 1


@pytest.mark.parametrize("losses", [decay(), [3.0] * 100, [-float(step) for step in range(100)]])
def test_a_decreasing_loss_has_none(losses):
    assert count_spikes(losses) == 0


def test_a_decreasing_loss_with_noise():
    losses = [a + b for a, b in zip(decay(), noise(size=0.02), strict=True)]
    assert count_spikes(losses) <= 1
    assert count_spikes(with_values(losses, {30: 12.0, 200: 8.0})) - count_spikes(losses) == 2


def test_a_downward_jump_is_none():
    assert count_spikes(with_values(noise(), {100: 0.1}), threshold=8) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(value):
    """Wherever it is: also at the start, where there is nothing to compare with."""
    for steps in ([0], [5], [100], [299]):
        assert count_spikes(with_values(noise(), dict.fromkeys(steps, value)), threshold=8) == 1, steps
    assert count_spikes(with_values(noise(), {100: value, 101: value, 102: 6.0, 104: value}), threshold=8) == 2
    assert count_spikes([value] * 10) == 1


def test_not_finite_values_do_not_fill_the_window():
    losses = [math.nan] * 5 + [1.0, 1.1, 50.0]
    assert count_spikes(losses, window=3) == 1, "two values are no full window of three"
    assert count_spikes(losses, window=2) == 2


@pytest.mark.parametrize("window", [2, 5, 20])
def test_window_borders(window):
    """A jump is told from the first value on that has a full window before it."""
    calm = [1.0, 1.1] * window
    assert count_spikes([*calm[: window - 1], 50.0], window) == 0
    assert count_spikes([*calm[:window], 50.0], window) == 1
    assert count_spikes(calm[:window], window) == 0
    assert count_spikes([], window) == count_spikes([1.0], window) == 0


def test_only_the_window_is_compared_with():
    """A level left behind is forgotten."""
    losses = [9.0, 9.1] * 10 + [1.0, 1.1] * 10
    assert count_spikes([*losses, 5.0], window=20) == 1
    assert count_spikes([*losses, 5.0], window=40) == 0


def test_the_threshold_is_in_robust_standard_deviations():
    losses = [1.0, 2.0, 3.0, 4.0, 5.0]  # median 3, median absolute deviation 1
    edge = 3 + 2 * 1.4826
    assert count_spikes([*losses, edge + 1e-9], window=5, threshold=2) == 1
    assert count_spikes([*losses, edge - 1e-9], window=5, threshold=2) == 0


@each(("window", "threshold"), [(1, 6.0), (0, 6.0), (-5, 6.0), (20, 0.0), (20, -1.0), (20, math.nan)])
def test_wrong_settings(window, threshold):
    with pytest.raises(ValueError, match=f"got ({window}|{threshold})"):
        count_spikes([1.0], window, threshold)
