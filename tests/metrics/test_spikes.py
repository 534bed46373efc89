"""Spike detection against its rules, written out."""

import math
import pickle
from itertools import product
from random import Random
from statistics import fmean, pstdev

import torch

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


def test_rules_go_to_processes_that_are_spawned():
    for rule in (mean_limit(6.0), median_limit(6.0)):
        assert pickle.loads(pickle.dumps(rule))([1.0, 2.0, 3.0], 0.1) == rule([1.0, 2.0, 3.0], 0.1)


def test_constant_losses_may_move_by_rounding_errors():
    for rule, least in ((mean_limit(6.0), 0.06), (median_limit(6.0), 6 / 512)):
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


def test_on_device():
    state, random = torch.zeros(len(SPIKE_STATE), dtype=torch.float32), Random(0)
    norms = [random.uniform(1, 2) for _ in range(15)] + [50.0, math.nan, 1.5]
    found = []
    for norm in norms:
        state, _, is_spike = detect_spike(state, torch.tensor(norm), factor=5.0, decay=0.9, warmup=10)
        found.append(bool(is_spike))
    assert found == [False] * 15 + [True, False, False]
    assert dict(zip(SPIKE_STATE, state.tolist(), strict=True))["averaged"] == 16


def test_on_device_many_spikes_are_a_new_level():
    state = torch.zeros(len(SPIKE_STATE), dtype=torch.float32)
    for norm in [1.0] * 12 + [100.0] * 40:
        state, mean, _ = detect_spike(state, torch.tensor(norm), factor=5.0, decay=0.9, warmup=10)
    assert state[-1] == 10 and mean == 100


def on_device(values):
    state, judged = torch.zeros(len(SPIKE_STATE), dtype=torch.float32), []
    for value in values:
        state, _, is_spike = detect_spike(state, torch.tensor(value), factor=5.0, decay=0.9, warmup=10)
        judged.append(bool(is_spike))
    return judged


def online(make):
    def judge(values):
        detector = make()
        return [detector.judge(value) for value in values]

    return judge


DETECTORS = {
    "losses": online(lambda: SpikeDetector(Window(20, mean_limit(6.0)), warmup=20)),
    "losses of a run": online(lambda: SpikeDetector(Window(20, median_limit(6.0)), warmup=20, learns_spikes=True)),
    "magnitudes": online(lambda: SpikeDetector(RunningMean(10.0, 20), warmup=10, learns_spikes=True)),
    "norms": on_device,
}
SIGNED = {"losses", "losses of a run"}


def falling(start, end, steps=200):
    """Stays, falls to ``end`` by a constant factor, and stays again, within a fifth."""
    random = Random(1)
    shares = [min(1.0, max(0, step - 30) / 100) for step in range(steps)]
    return [start ** (1 - share) * end**share * random.uniform(0.8, 1.2) for share in shares]


@each("name, end", product(DETECTORS, [1e-5, 1e-9, 1e-30]))
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
