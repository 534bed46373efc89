"""Detects spikes: values far above the values before them.

A detector has a warm-up and a baseline, which learns the normal level. The rules of this package:

    losses, online      SpikeDetector(Window(100, mean_limit(6.0)), warmup=100)
    losses of a run     SpikeDetector(Window(20, median_limit(6.0)), warmup=20, learns_spikes=True)
    largest magnitudes  SpikeDetector(RunningMean(factor=10.0, memory=50), warmup=10, learns_spikes=True)
    gradient norms      detect_spike(...), the same on the device, without waiting for it

Relative to a mean near 0 every value is large, as the loss of a run that has converged. So a spike also rises by
LEAST_RISE of the level at the beginning, which a baseline learns first.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean, median, pstdev

import torch
from torch import Tensor

from lightning_lowbit.checks import integer, positive

# A smaller rise is no spike: it is far below the level at the beginning, and still far above rounding errors.
LEAST_RISE = 0.001


# A rule: the limit, from the values and the least rise of a spike.
Rule = Callable[[Sequence[float], float], float]


class Window:
    """The last ``length`` values, and the limit that a rule such as :func:`mean_limit` computes from them.

    Values of 0 are not learned: a metric that is off has no level. ``start`` is the median magnitude of the first
    ``length`` values.
    """

    def __init__(self, length: int, rule: Rule) -> None:
        self.values: deque[float] = deque(maxlen=length)
        self.count, self.start = 0, 0.0
        self._length, self._rule = length, rule

    def add(self, value: float) -> None:
        if value == 0:
            return
        self.values.append(value)
        self.count += 1
        if self.count <= self._length:
            self.start = _magnitude(self.values)

    def limit(self) -> float:
        return self._rule(self.values, LEAST_RISE * self.start)

    def load(self, values: Iterable[float], count: int, start: float | None = None) -> None:
        """Loads learned values; an unknown ``start`` is computed from them."""
        self.values.clear()
        self.values.extend(values)
        self.count, self.start = count, _magnitude(self.values) if start is None else start


def _magnitude(values: Iterable[float]) -> float:
    magnitudes = [*map(abs, values)]
    return median(magnitudes) if magnitudes else 0.0


class RunningMean:
    """A limit of ``factor`` times a mean: at first of all values, then exponential over about ``memory`` values.

    Values of 0 are not learned here, either. ``start`` is the mean of the first ``memory`` values.
    """

    def __init__(self, factor: float, memory: int) -> None:
        self.count, self.mean, self.start = 0, 0.0, 0.0
        self._factor, self._memory = factor, memory

    def add(self, value: float) -> None:
        if value == 0:
            return
        is_early = self.count < self._memory
        self.count = min(self.count + 1, self._memory)
        self.mean += (value - self.mean) / self.count
        self.start = self.mean if is_early else self.start

    def limit(self) -> float:
        return max(self._factor * self.mean, self.mean + LEAST_RISE * self.start) if self.mean > 0 else math.inf


def mean_limit(threshold: float, least: float = 0.01) -> Rule:
    """Makes the rule ``mean + threshold · max(deviation, least · |mean|)``; ``least`` is for rounding errors."""
    return partial(_mean_limit, threshold, least)


def median_limit(threshold: float, least: float = 1 / 512) -> Rule:
    """Makes the rule ``median + threshold · max(1.4826 · MAD, least · |median|)``, which past spikes hardly move.

    MAD is the median absolute deviation; 1.4826 MAD is the standard deviation of normally distributed values. ``least``
    is needed because losses rounded to bfloat16 are often all equal.
    """
    return partial(_median_limit, threshold, least)


# Functions of the module: launchers that spawn processes pickle the callbacks that have such a rule.


def _mean_limit(threshold: float, least: float, values: Sequence[float], least_rise: float) -> float:
    mean = fmean(values)
    return mean + max(threshold * max(pstdev(values, mean), least * abs(mean)), least_rise)


def _median_limit(threshold: float, least: float, values: Sequence[float], least_rise: float) -> float:
    center = median(values)
    deviation = 1.4826 * median(abs(value - center) for value in values)
    return center + max(threshold * max(deviation, least * abs(center)), least_rise)


class SpikeDetector:
    """Judges values one by one: a spike is not finite, or exceeds the limit of the baseline.

    Args:
        baseline: learns the normal level.
        warmup: learned values before a finite one can be a spike.
        learns_spikes: the baseline also learns finite spikes, so that a value that stays high becomes normal.

    Examples:
        >>> detector = SpikeDetector(Window(100, mean_limit(6.0)), warmup=2)
        >>> [detector.judge(loss) for loss in (2.0, 2.1, 9.0, 2.0)]
        [False, False, True, False]
    """

    def __init__(self, baseline: "Window | RunningMean", warmup: int, learns_spikes: bool = False) -> None:
        self.baseline, self.warmup, self.learns_spikes = baseline, warmup, learns_spikes

    @property
    def limit(self) -> float:
        """The value above which a spike begins; infinite during the warm-up."""
        return self.baseline.limit() if self.baseline.count >= self.warmup else math.inf

    def judge(self, value: float) -> bool:
        """Tells whether the next value is a spike. Values that are not finite are never learned."""
        if not math.isfinite(value):
            return True
        is_spike = value > self.limit
        if self.learns_spikes or not is_spike:
            self.baseline.add(value)
        return is_spike


def count_spikes(losses: Sequence[float], window: int = 20, threshold: float = 6.0) -> int:
    """Counts the spikes of a loss.

    A value is a spike when it is not finite, or more than ``threshold`` robust standard deviations (1.4826 times the
    median absolute deviation) above the median of the ``window`` values before it. Consecutive ones count once. A loss
    that stays high becomes normal after half a window.

    Args:
        losses: training losses in nats, in the order of steps.
        window: values to compare with, 2 or more; before the first full window only NaN and infinity are spikes.
        threshold: in standard deviations, above 0.
    """
    integer("window", window, 2, "a number of losses")
    positive("threshold", threshold, "a number of standard deviations")
    detector = SpikeDetector(Window(window, median_limit(threshold)), window, learns_spikes=True)
    spikes = [detector.judge(loss) for loss in losses]
    return sum(now and not before for before, now in zip([False, *spikes], spikes, strict=False))


# The state of `detect_spike`, one float32 tensor: the weighted sum and the sum of weights of the mean, the number of
# values in it, the number of consecutive spikes just now, the mean of the first values, and the number of all spikes.
SPIKE_STATE = ("sum", "weight", "averaged", "in_a_row", "start", "spikes")


def detect_spike(
    state: Tensor, value: Tensor, factor: float, decay: float, warmup: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Judges a 0-d value on its device: a spike is finite and exceeds ``factor`` times an exponential mean.

    It also rises above the mean by ``LEAST_RISE`` of the mean of the first ``warmup`` values. The mean learns finite
    values above 0 that are no spikes, with ``decay`` in [0, 1). It needs ``warmup`` of them before any value is a
    spike. After ``warmup`` consecutive spikes, which are a new level, it starts again. ``state`` are float32 numbers
    named by ``SPIKE_STATE``, zeros at first.

    Returns the next state; the mean before the value (NaN if there is none); whether the value is a spike.
    """
    total, weight, averaged, in_a_row, start, spikes = state.to(value.device).unbind()
    mean = total / weight
    is_large = (value > factor * mean) & (value > mean + LEAST_RISE * start)
    is_spike = value.isfinite() & (averaged >= warmup) & is_large
    enters = value.isfinite() & (value > 0) & ~is_spike
    share = enters.to(value) * (1 - decay)
    sums = [total.lerp(torch.where(enters, value, 0.0), share), weight.lerp(torch.ones_like(weight), share)]
    start = torch.where(enters & (averaged < warmup), sums[0] / sums[1], start)
    in_a_row = torch.where(enters, 0, in_a_row + is_spike)
    remembered = torch.where(in_a_row < warmup, torch.stack([*sums, averaged + enters, in_a_row, start]), 0)
    return torch.cat([remembered, (spikes + is_spike)[None]]), mean, is_spike
