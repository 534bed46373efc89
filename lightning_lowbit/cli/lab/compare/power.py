"""Intervals of paired differences, and how many pairs an effect needs: Student's t, for normal differences."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev, variance

from scipy.optimize import brentq
from scipy.stats import chi2, nct, t

CONFIDENCE, POWER = 0.95, 0.8
MOST_PAIRS = 1000


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
        high, low = (chi2.ppf((1 + sign * CONFIDENCE) / 2, self.df) for sign in (1, -1))
        return self.value * math.sqrt(self.df / high), self.value * math.sqrt(self.df / low)


@cache
def t_quantile(probability: float, df: int) -> float:
    """Returns the quantile of Student's t with ``df`` degrees of freedom.

    Examples:
        >>> round(t_quantile(0.975, 2), 6), round(t_quantile(0.975, 9), 6)
        (4.302653, 2.262157)
    """
    return float(t.ppf(probability, df))


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
    return bisect_left(range(2, MOST_PAIRS), POWER, key=lambda pairs: power(effect, spread, pairs)) + 2


def resolved_by(pairs: int, spread: float) -> float | None:
    """Returns the smallest effect that ``pairs`` resolve with 80 % power at 5 %; None with fewer than two."""
    return spread * _resolved_by(pairs) if pairs > 1 else None


@cache
def _resolved_by(pairs: int) -> float:
    return float(brentq(lambda ratio: _power(ratio, pairs) - POWER, 0, 30))  # 20 of two pairs, which need most


@cache
def _power(ratio: float, pairs: int) -> float:
    return float(nct.sf(t_quantile((1 + CONFIDENCE) / 2, pairs - 1), pairs - 1, ratio * math.sqrt(pairs)))
