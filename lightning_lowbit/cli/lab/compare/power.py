"""Computes intervals of paired differences, and how many pairs an effect needs.

For whole degrees of freedom, Student's t distribution is a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4). The
noncentral one is an integral over the estimated spread, by Simpson's rule.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, mean, stdev, variance

CONFIDENCE, POWER = 0.95, 0.8
MOST_PAIRS = 1000
_POINTS = 400  # of Simpson's rule


@dataclass(frozen=True)
class Interval:
    """The mean of paired differences with a two-sided 95 % interval; ``df`` are the degrees of freedom, pairs - 1."""

    mean: float
    low: float
    high: float
    df: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Interval | None":
        """Returns the interval; None with fewer than two differences, or if one is not finite.

        Examples:
            >>> Interval.of([0.01, 0.02, 0.03])
            Interval(mean=0.02, low=-0.0048..., high=0.0448..., df=2)
        """
        if len(differences) < 2 or not all(map(math.isfinite, differences)):
            return None
        center, df = mean(differences), len(differences) - 1
        half = t_quantile((1 + CONFIDENCE) / 2, df) * stdev(differences) / math.sqrt(len(differences))
        return cls(center, center - half, center + half, df)


@dataclass(frozen=True)
class Spread:
    """The standard deviation of paired differences, estimated with ``df`` degrees of freedom."""

    value: float
    df: int

    @classmethod
    def pooled(cls, samples: Sequence[Sequence[float]]) -> "Spread | None":
        """Pools the differences of rows; rows with fewer than two, or with one that is not finite, are left out."""
        known = [sample for sample in samples if len(sample) > 1 and all(map(math.isfinite, sample))]
        df = sum(len(sample) - 1 for sample in known)
        if not df:
            return None
        return cls(math.sqrt(sum((len(sample) - 1) * variance(sample) for sample in known) / df), df)

    def bounds(self) -> tuple[float, float]:
        """Returns a 95 % interval of the true standard deviation, for normal differences."""

        def ratio(probability: float) -> float:  # of the estimated to the true one
            return _bisect(lambda end: _over_spreads(lambda _: 1.0, self.df, end) - probability)

        return self.value / ratio((1 + CONFIDENCE) / 2), self.value / ratio((1 - CONFIDENCE) / 2)


def t_quantile(probability: float, df: int) -> float:
    """Returns the quantile of Student's t with ``df`` degrees of freedom; ``probability`` is 1/2 or more.

    Examples:
        >>> round(t_quantile(0.975, 2), 6), round(t_quantile(0.975, 9), 6)
        (4.302653, 2.262157)
    """
    return _bisect(lambda t: _t_within(t, df) - (2 * probability - 1))


def power(effect: float, spread: float, pairs: int) -> float:
    """Returns the probability that the interval of ``pairs`` differences excludes 0 on the side of a true ``effect``.

    Exact for normal differences: the noncentral t distribution with ``pairs - 1`` degrees of freedom.

    Examples:
        >>> round(power(1.0, 1.0, 10), 3)
        0.803
    """
    if pairs < 2:
        return 0.0
    return _power(abs(effect) / spread, pairs) if spread else 1.0


def pairs_for(effect: float, spread: float) -> int | None:
    """Returns the fewest pairs that resolve an effect with 80 % power at 5 %; None if more than ``MOST_PAIRS``."""
    if power(effect, spread, MOST_PAIRS) < POWER:
        return None
    low, high = 1, MOST_PAIRS  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, spread, middle) >= POWER else (middle, high)
    return high


def resolved_by(pairs: int, spread: float) -> float | None:
    """Returns the smallest effect that ``pairs`` resolve with 80 % power at 5 %; None with fewer than two."""
    return spread * _resolved_by(pairs) if pairs > 1 else None


@cache
def _resolved_by(pairs: int) -> float:
    return _bisect(lambda ratio: _power(ratio, pairs) - POWER)


@cache
def _power(ratio: float, pairs: int) -> float:
    critical, shift = _critical(pairs - 1), ratio * math.sqrt(pairs)
    return _over_spreads(lambda s: NormalDist().cdf(shift - critical * s), pairs - 1)


@cache
def _critical(df: int) -> float:
    return t_quantile((1 + CONFIDENCE) / 2, df)


def _t_within(t: float, df: int) -> float:
    angle = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    if df % 2 == 0:
        term = total = 1.0
        for k in range(2, df, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        return sine * total
    term = total = cosine if df > 1 else 0.0
    for k in range(2, df - 1, 2):
        term *= cosine**2 * k / (k + 1)
        total += term
    return 2 / math.pi * (angle + sine * total)


def _over_spreads(value: Callable[[float], float], df: int, end: float = math.inf) -> float:
    """Averages a function of the estimated over the true standard deviation (a chi variable over the root of df)."""
    width = 10 / math.sqrt(2 * df)
    low, high = max(0.0, 1 - width), min(1 + width, end)
    if high <= low:
        return 0.0
    constant = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)

    def density(s: float) -> float:
        if s == 0:
            return math.exp(constant) if df == 1 else 0.0
        return math.exp(constant + (df - 1) * math.log(s) - df * s * s / 2)

    step = (high - low) / _POINTS
    points = [low + step * i for i in range(_POINTS + 1)]
    weights = [1, *(4 if i % 2 else 2 for i in range(1, _POINTS)), 1]
    return step / 3 * sum(w * density(s) * value(s) for w, s in zip(weights, points, strict=True))


def _bisect(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
