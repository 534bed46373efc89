"""Spike detection against its rules, written out; planted spikes of a loss are found, and nothing else is."""

import math
import pickle
from itertools import product
from random import Random
from statistics import fmean, pstdev

import pytest
import torch

from lightning_lowbit.metrics import count_spikes
from lightning_lowbit.metrics.spikes import (
    SPIKE_STATE,
    RunningMean,
    SpikeDetector,
    Window,
    detect_spike,
    mean_limit,
    median_limit,
)
from tests.tables import each


def losses(seed, count=300):
    random = Random(seed)
    values = [random.gauss(5, 0.1) for _ in range(count)]
    for step in random.sample(range(100, count), 12):
        values[step] = random.choice([5.5, 5.9, 12.0, math.nan, math.inf])
    return values


@each("seed", range(5))
def test_mean_and_deviation(seed):
    detector, good = SpikeDetector(Window(50, mean_limit(6.0)), warmup=70), []
    found = 0
    for loss in losses(seed):
        mean = fmean(good[-50:]) if good else 0.0
        limit = mean + 6.0 * max(pstdev(good[-50:], mean), 0.01 * abs(mean)) if len(good) >= 70 else math.inf
        assert detector.limit == limit
        is_spike = not math.isfinite(loss) or loss > limit
        assert detector.judge(loss) == is_spike
        good += [] if is_spike else [loss]
        found += is_spike
    assert found >= 5


def test_constant_losses_may_move_by_rounding_errors():
    for rule, least in ((mean_limit(6.0), 0.06), (median_limit(6.0), 6 / 512)):
        rule = pickle.loads(pickle.dumps(rule))  # it goes to processes that are spawned
        detector = SpikeDetector(Window(20, rule), warmup=20)
        assert not any(detector.judge(2.0) for _ in range(20))
        assert not detector.judge(2.0 * (1 + least)) and detector.judge(2.0 * (1 + 3 * least))


def test_a_high_level_becomes_normal_only_if_spikes_are_learned():
    values = [1.0] * 20 + [5.0] * 100
    learns = SpikeDetector(Window(20, median_limit(6.0)), warmup=20, learns_spikes=True)
    assert sum(learns.judge(value) for value in values) == 10, "half a window"
    ignores = SpikeDetector(Window(20, median_limit(6.0)), warmup=20)
    assert sum(ignores.judge(value) for value in values) == 100


def test_running_mean():
    detector = SpikeDetector(RunningMean(factor=10.0, memory=50), warmup=10, learns_spikes=True)
    random, count, mean = Random(0), 0, 0.0
    for step in range(200):
        value = random.uniform(1, 2) * (20 if step in (5, 30, 150) else 1)
        expected = count >= 10 and value > 10 * mean
        assert detector.judge(value) == expected == (step in (30, 150))
        count = min(count + 1, 50)
        mean += (value - mean) / count
    assert (detector.baseline.count, detector.limit) == (50, 10 * mean)


def test_no_multiple_of_zero_is_a_spike():
    detector = SpikeDetector(RunningMean(factor=10.0, memory=50), warmup=10)
    assert not any(detector.judge(0.0) for _ in range(20)) and not detector.judge(1.0)
    endless = SpikeDetector(RunningMean(factor=math.inf, memory=50), warmup=1)
    assert not any(endless.judge(value) for value in (0.0, 1.0, 1e30))


def on_device(values):
    """Whether each value is a spike, the mean before the last one, and the state at last, by name."""
    state, judged = torch.zeros(len(SPIKE_STATE), dtype=torch.float32), []
    for value in values:
        state, mean, is_spike = detect_spike(state, torch.tensor(value), factor=5.0, decay=0.9, warmup=10)
        judged.append(bool(is_spike))
    return judged, mean, dict(zip(SPIKE_STATE, state.tolist(), strict=True))


def test_on_device():
    random = Random(0)
    judged, _, state = on_device([random.uniform(1, 2) for _ in range(15)] + [50.0, math.nan, 1.5])
    assert judged == [False] * 15 + [True, False, False]
    assert state["averaged"] == 16
    _, mean, state = on_device([1.0] * 12 + [100.0] * 40)
    assert state["spikes"] == 10 and mean == 100, "many spikes are a new level"


def online(make):
    def judge(values):
        detector = make()
        return [detector.judge(value) for value in values]

    return judge


DETECTORS = {
    "losses": online(lambda: SpikeDetector(Window(20, mean_limit(6.0)), warmup=20)),
    "losses of a run": online(lambda: SpikeDetector(Window(20, median_limit(6.0)), warmup=20, learns_spikes=True)),
    "magnitudes": online(lambda: SpikeDetector(RunningMean(10.0, 20), warmup=10, learns_spikes=True)),
    "norms": lambda values: on_device(values)[0],
}
SIGNED = {"losses", "losses of a run"}


def falling(start, end, steps=200):
    """Stays, falls to ``end`` by a constant factor, and stays again, within a fifth."""
    random = Random(1)
    shares = [min(1.0, max(0, step - 30) / 100) for step in range(steps)]
    return [start ** (1 - share) * end**share * random.uniform(0.8, 1.2) for share in shares]


@each("name, end", product(DETECTORS, [1e-5, 1e-9, 1e-30]), fast=5)
def test_nothing_spikes_where_a_run_has_converged(name, end):
    """Relative to what is near 0, though not to what the run began with."""
    calm = falling(2.0, end)
    for value, is_spike in ((30 * end, False), (2e-4, False), (1.0, True)):
        judged = DETECTORS[name]([*calm, value])
        assert not any(judged[:-1]) and judged[-1] == is_spike, f"{value} after {end}"


@each("name", DETECTORS)
def test_spikes_of_a_run_that_has_not_converged_are_as_before(name):
    """A thousandth of the beginning is within the noise of what is a tenth of it."""
    calm = falling(2.0, 0.2)
    for factor, is_spike in ((1.2, False), (20.0, True)):
        assert DETECTORS[name]([*calm, 0.2 * factor])[-1] == is_spike


@each("name", DETECTORS.keys() - SIGNED)
def test_what_was_off_has_no_level(name):
    """Frozen parameters and dead layers: zeros, and then what is usual."""
    random = Random(2)
    usual = [random.uniform(1, 2) for _ in range(40)]
    judged = DETECTORS[name]([*[0.0] * 50, *usual, *[0.0] * 50, *usual, 100.0])
    assert not any(judged[:-1]) and judged[-1]


@each("name", SIGNED)
def test_losses_below_zero_and_through_it(name):
    random = Random(3)
    noise = [random.gauss(0, 0.05) for _ in range(300)]
    for calm in (
        [3 - step / 50 + noise[step] for step in range(300)],
        [-3 + noise[step] for step in range(300)],
        [noise[step] for step in range(300)],
    ):
        judged = DETECTORS[name]([*calm, calm[-1] + 2.0])
        assert not any(judged[:-1]) and judged[-1]
    assert not any(DETECTORS[name]([0.0] * 300)), "zeros"
    assert not any(DETECTORS[name]([1.0] * 300)), "as accuracies"


@each("rule", [mean_limit(6.0), median_limit(6.0)])
def test_what_begins_after_zeros_is_no_spike(rule):
    """Such as the loss of an agent whose buffer is still empty."""
    detector = SpikeDetector(Window(100, rule), warmup=20)
    assert not any(detector.judge(loss) for loss in [*[0.0] * 150, *[2.0 + 0.01 * (i % 7) for i in range(50)]])
    assert detector.judge(20.0)


def noise(steps=300, seed=0, size=0.05):
    generator = torch.Generator().manual_seed(seed)
    return (3 + size * torch.randn(steps, generator=generator, dtype=torch.float64)).tolist()


def with_values(losses, values):
    return [values.get(step, loss) for step, loss in enumerate(losses)]


@each("seed", range(5))
@each("steps", [[100], [40, 150, 151, 290], [20], [299]])
def test_planted_spikes(seed, steps):
    """Neighbors are one spike; the first value with a full window before it may be one, and so may the last."""
    losses = noise(seed=seed)
    assert count_spikes(losses, threshold=8) == 0
    found = count_spikes(with_values(losses, dict.fromkeys(steps, 6.0)), threshold=8)
    assert found == len([step for step in steps if step - 1 not in steps])


@each(
    "values, spikes",
    [
        ({step: 6.0 - step / 1000 for step in range(100, 150)}, 1),  # high values are one spike, however long
        (dict.fromkeys(range(50, 290, 3), 6.0), 80),  # what jumped is not what the next one is compared with
        ({100: 0.1}, 0),  # downward
    ],
)
def test_jumps(values, spikes):
    assert count_spikes(with_values(noise(), values), threshold=8) == spikes


def test_noise_is_rarely_a_spike():
    counts = [count_spikes(noise(1000, seed)) for seed in range(5)]
    assert sum(counts) <= 5 * 1000 * 0.003, f"too many of 1000 values each: {counts}"
    for size in (0.003, 0.005, 0.01, 0.02):  # in bfloat16 most losses are the same number, and the next is no jump
        assert count_spikes(torch.tensor(noise(size=size)).bfloat16().tolist()) <= 1, size


def test_a_decreasing_loss_has_none():
    decay = [2 + 5 * math.exp(-step / 60) for step in range(300)]
    for losses in (decay, [3.0] * 100, [-float(step) for step in range(100)]):
        assert count_spikes(losses) == 0
    losses = [a + b for a, b in zip(decay, noise(size=0.02), strict=True)]
    assert count_spikes(losses) <= 1
    assert count_spikes(with_values(losses, {30: 12.0, 200: 8.0})) - count_spikes(losses) == 2


@each("value", [math.nan, math.inf, -math.inf])
def test_not_finite(value):
    """Wherever it is: also at the start, where there is nothing to compare with."""
    for steps in ([0], [5], [100], [299]):
        assert count_spikes(with_values(noise(), dict.fromkeys(steps, value)), threshold=8) == 1, steps
    assert count_spikes(with_values(noise(), {100: value, 101: value, 102: 6.0, 104: value}), threshold=8) == 2
    assert count_spikes([value] * 10) == 1


@each("window", [2, 5, 20])
def test_window_borders(window):
    """A jump is told from the first value on that has a full window before it."""
    calm = [1.0, 1.1] * window
    assert count_spikes([*calm[: window - 1], 50.0], window) == 0
    assert count_spikes([*calm[:window], 50.0], window) == 1
    assert count_spikes(calm[:window], window) == 0
    assert count_spikes([], window) == count_spikes([1.0], window) == 0


EDGE = 3 + 2 * 1.4826  # of 1 to 5 the median is 3, and 1 the median absolute deviation


@each("losses, window, spikes", [
    ([9.0, 9.1] * 10 + [1.0, 1.1] * 10 + [5.0], 20, 1),  # a level left behind is forgotten
    ([9.0, 9.1] * 10 + [1.0, 1.1] * 10 + [5.0], 40, 0),
    ([math.nan] * 5 + [1.0, 1.1, 50.0], 3, 1),  # two finite values are no full window of three
    ([math.nan] * 5 + [1.0, 1.1, 50.0], 2, 2),
    ([1, 2, 3, 4, 5, EDGE + 1e-9], 5, 1),
    ([1, 2, 3, 4, 5, EDGE - 1e-9], 5, 0),
])  # fmt: skip
def test_only_the_window_is_compared_with(losses, window, spikes):
    assert count_spikes(losses, window, threshold=2 if window == 5 else 6) == spikes


@each(("window", "threshold"), [(1, 6.0), (0, 6.0), (-5, 6.0), (20, 0.0), (20, -1.0), (20, math.nan)])
def test_wrong_settings(window, threshold):
    with pytest.raises(ValueError, match=f"got ({window}|{threshold})"):
        count_spikes([1.0], window, threshold)
