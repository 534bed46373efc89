"""Estimates how many seeds each expected effect needs, from the spread of the known differences.

The power of a paired t-test at 5 % (noncentral t) is the probability of the verdict ``shown`` if the effect is as large
as the source claims. One pooled spread serves all effects.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, variance

from scipy.optimize import brentq
from scipy.stats import chi2, nct

from lightning_lowbit.cli.lab.compare.claims import CONFIDENCE, Effect, t_quantile
from lightning_lowbit.cli.lab.compare.losses import Results, differences
from lightning_lowbit.report.blocks import Table, Text
from lightning_lowbit.report.formatting import duration, number

POWER, MOST_PAIRS = 0.8, 1000
PILOT_SEEDS = 2
_FEW = 10  # degrees of freedom below which the spread is rough

Seeds = Mapping[str, Sequence[int]]  # planned, by row


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


def pilot_seeds(effects: Sequence[Effect], seeds: Seeds, name: str | None) -> dict[str, list[int]]:
    """Chooses the first two seeds that both rows of an effect share, by row; effects with a size come first."""
    if name is None:
        raise ValueError("--pilot needs the expected effects of a study: give one with --study.")
    if not effects:
        raise ValueError(
            f"--pilot needs expected effects, and study {name!r} has none: write effects such as "
            "{ROW: {expected: +0.02}} into a copy (`lowbit cp`)."
        )
    for effect in sorted(effects, key=lambda effect: effect.size is None):
        if len(shared := _shared(effect, seeds)) >= PILOT_SEEDS:
            return dict.fromkeys((effect.against, effect.row), shared[:PILOT_SEEDS])
    raise ValueError("--pilot needs two seeds that both rows of an expected effect have: give them with --seeds 0,1.")


def _shared(effect: Effect, seeds: Seeds) -> list[int]:
    return [seed for seed in seeds[effect.against] if seed in seeds[effect.row]]


def spread_of(effects: Sequence[Effect], results: Results, baseline: str) -> Spread | None:
    """Pools the spread; a row counts once, against the row of its first effect, or against the baseline."""
    against = dict.fromkeys(results, baseline) | {effect.row: effect.against for effect in reversed(effects)}
    return Spread.pooled([differences(results, row, other) for row, other in against.items() if row != other])


def power_table(effects: Sequence[Effect], seeds: Seeds, results: Results, spread: Spread, needed: bool) -> Table:
    """Tabulates power by effect; ``needed`` adds the seeds, the time and the tokens that give 80 % power."""
    header = ["claim", "expected", "seeds", "power", "resolved with 80 % power"]
    header += ["seeds needed", "time", "or tokens", "steps"] if needed else []
    rows = []
    for effect in effects:
        pairs, size = len(_shared(effect, seeds)), effect.amount(results)
        smallest = resolved_by(pairs, spread.value)
        row = [
            effect.name,
            effect.expected,
            str(pairs),
            "" if size is None else f"{100 * power(size, spread.value, pairs):.0f} %",
            "" if smallest is None else f"{smallest:.4f}",
        ]
        rows.append(row + (_needed(effect, size, smallest, results, spread) if needed else []))
    return Table(header, rows)


def _needed(effect: Effect, size: float | None, smallest: float | None, results: Results, spread: Spread) -> list[str]:
    if size is None:
        return ["", "", "", ""]
    pairs = pairs_for(size, spread.value)
    low, high = (_count(pairs_for(size, bound)) for bound in spread.bounds())
    seeds = f"{_count(pairs)} ({low} to {high})" if pairs else _count(pairs)
    seconds = _seconds(effect, results)
    time = duration(pairs * seconds) if pairs and seconds else ""
    if smallest is None:
        return [seeds, time, "", ""]
    times = (smallest / size) ** 2
    steps = [run.steps for row in (effect.row, effect.against) for run in results.get(row, {}).values()]
    steps = steps or [run.steps for runs in results.values() for run in runs.values()]
    if times <= 1:
        return [seeds, time, "enough", ""]
    return [seeds, time, f"× {times:.1f}", number(math.ceil(times * max(steps)))]


def _count(pairs: int | None) -> str:
    return f"{MOST_PAIRS:,}+" if pairs is None else str(pairs)


def _seconds(effect: Effect, results: Results) -> float:
    measured = {row: [run.seconds for run in runs.values()] for row, runs in results.items() if runs}
    usual = [second for seconds in measured.values() for second in seconds]
    return sum(mean(measured.get(row) or usual) for row in (effect.row, effect.against))


def notes(spread: Spread, needed: bool) -> list[str]:
    low, high = spread.bounds()
    freedom = f"{spread.df} degree{'s' if spread.df > 1 else ''} of freedom"
    known = f"Spread of the paired differences: {spread.value:.4f} ({freedom}; 95 %: {low:.4f} to {high:.4f})."
    if spread.df < _FEW:
        known += " So few pairs say it roughly: twice the spread needs four times the seeds."
    lines = [known, "Power: of a paired t-test at 5 %, two-sided (noncentral t)."]
    if needed:
        lines += [
            "Seeds needed: for 80 % power, and in parentheses at the ends of the interval of the spread.",
            "Time: of both rows with the seeds needed, one run at a time, as long as the finished ones took.",
            "Tokens, or steps of the same batch, with the seeds of the study: assumes that the spread shrinks as "
            "1/√tokens, and that the effect stays.",
        ]
    return lines


def power_blocks(
    effects: Sequence[Effect], seeds: Seeds, results: Results, baseline: str, needed: bool
) -> list[Table | Text]:
    """Returns the table and its notes; nothing without effects, or before a row has two seeds."""
    spread = spread_of(effects, results, baseline) if effects else None
    if spread is None:
        return []
    table = power_table(effects, seeds, results, spread, needed)
    return [table, *map(Text, notes(spread, needed))]
