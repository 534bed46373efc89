"""The effects that a study expects, and the verdict on each, from the 95 % interval of paired differences."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev
from typing import Any

from scipy.stats import t

from lightning_lowbit.checks import choose, is_number
from lightning_lowbit.cli.configs import as_list
from lightning_lowbit.cli.lab.compare.losses import Results, collect, differences, final_loss
from lightning_lowbit.report.blocks import Table

CONFIDENCE = 0.95
SHOWN, CONTRADICTED, NOT_SHOWN, NO_POWER = "shown", "contradicted", "not shown", "no power"

_DIRECTIONS = {"lower": -1, "higher": 1}
_FIELDS = ("against", "expected", "source")


@dataclass(frozen=True)
class Effect:
    """A claim: the final validation loss of ``row`` is that of ``against`` plus ``size`` in the direction of ``sign``.

    The size is in units of the loss (nats of a language model), or, if ``is_share``, a share of the loss of
    ``against``, which is the same per token and per byte. None is a claim about the sign alone.
    """

    row: str
    against: str
    sign: int
    size: float | None
    is_share: bool = False
    source: str = ""

    @property
    def name(self) -> str:
        return f"{self.row} against {self.against}"

    @property
    def expected(self) -> str:
        return self._text(3, 4)

    @property
    def written(self) -> str:
        """The effect as a study has it, with all digits."""
        return self._text(12, 12)

    def _text(self, digits_of_share: int, digits: int) -> str:
        if self.size is None:
            return "lower" if self.sign < 0 else "higher"
        size = self.sign * self.size
        return f"{100 * size:+.{digits_of_share}g}%" if self.is_share else f"{size:+.{digits}g}"

    def amount(self, results: Results) -> float | None:
        """Returns the size in units of the loss, without its sign; None if unknown.

        Without runs of ``against``, a share is one of the mean loss of all rows.
        """
        if self.size is None or not self.is_share:
            return self.size
        losses = collect(results.get(self.against, {}).values(), final_loss)
        losses = losses or [loss for runs in results.values() for loss in collect(runs.values(), final_loss)]
        finite = list(filter(math.isfinite, losses))
        return self.size * mean(finite) if finite else None


def read_effects(content: Any, rows: Sequence[str], baseline: str, where: str) -> list[Effect]:
    """Reads the effects of a study: by row, ``{against: row, expected: size, source: text}`` or a list of these."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: effects are written by row, such as {{fp4: {{expected: +0.02}}}}; got {content!r}.")
    pairs = [(row, entry) for row, entries in content.items() for entry in as_list(entries)]
    effects = [_effect(row, entry, rows, baseline, where) for row, entry in pairs]
    names = [effect.name for effect in effects]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{where}: effects has {twice[0]!r} twice. Leave one out.")
    return effects


def _effect(row: str, entry: Any, rows: Sequence[str], baseline: str, where: str) -> Effect:
    choose(f"row in effects of {where}", row, rows)
    subject = f"{where}: the effect of row {row!r}"
    if not isinstance(entry, Mapping) or "expected" not in entry:
        raise ValueError(f"{subject} is a mapping with expected, such as {{expected: +0.02}}; got {entry!r}.")
    for name in entry:
        choose(f"field of {subject[len(where) + 2 :]} in {where}", name, _FIELDS)
    against = choose(f"row in effects of {where}", entry.get("against", baseline), rows)
    if against == row:
        raise ValueError(f"{subject} compares it with itself: name another row as against.")
    source = entry.get("source", "")
    if not isinstance(source, str):
        raise ValueError(f"{subject} has a source that is no text: put it in quotes; got {source!r}.")
    return Effect(row, against, *_size(entry["expected"], subject), source)


def _size(expected: Any, subject: str) -> tuple[int, float | None, bool]:
    if isinstance(expected, str) and expected in _DIRECTIONS:
        return _DIRECTIONS[expected], None, False
    text = str(expected) if is_number(expected) or isinstance(expected, str) else ""
    match = re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(%?)", text.strip(), re.IGNORECASE)
    size = float(match[1]) if match else 0.0
    if not match or not 0 < abs(size) < math.inf:
        raise ValueError(
            f"{subject}: expected is a difference of losses such as +0.02 or -3.4% (of the other row's loss), or "
            f"lower or higher; got {expected!r}."
        )
    return (1 if size > 0 else -1), abs(size) / (100 if match[2] else 1), bool(match[2])


@cache
def t_quantile(probability: float, df: int) -> float:
    """Returns the quantile of Student's t with ``df`` degrees of freedom.

    Examples:
        >>> round(t_quantile(0.975, 2), 6), round(t_quantile(0.975, 9), 6)
        (4.302653, 2.262157)
    """
    return float(t.ppf(probability, df))


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


def verdict(interval: Interval | None, sign: int, size: float | None = None) -> str:
    """Judges by an interval an effect of a sign and a size, or of a sign alone.

    ``shown``: the interval excludes 0, in the direction of the sign. ``contradicted``: it excludes 0 in the other one.
    ``not shown``: it contains 0 and excludes the size. ``no power``: it contains both, or there is no interval.

    Examples:
        >>> verdict(Interval.of([0.021, 0.019, 0.02]), sign=1, size=0.02)
        'shown'
        >>> verdict(Interval.of([0.03, -0.03, 0.0]), sign=1, size=0.02)
        'no power'
    """
    if interval is None:
        return NO_POWER
    low, high = (interval.low, interval.high) if sign > 0 else (-interval.high, -interval.low)
    if low > 0:
        return SHOWN
    if high < 0:
        return CONTRADICTED
    includes_it = high > 0 if size is None else high >= size
    return NO_POWER if includes_it else NOT_SHOWN


def claims_table(effects: Sequence[Effect], results: Results) -> Table:
    rows = []
    for effect in effects:
        cells, size = gap_cells(differences(results, effect.row, effect.against)), effect.amount(results)
        expected = effect.expected + (f" ({effect.sign * size:+.4f})" if effect.is_share and size else "")
        rows.append([effect.name, expected, *cells, verdict_on(effect, results), effect.source])
    return Table(["claim", "expected", "difference", "95 % interval", "verdict", "source"], rows)


def verdict_on(effect: Effect, results: Results) -> str:
    interval = Interval.of(differences(results, effect.row, effect.against))
    return verdict(interval, effect.sign, effect.amount(results))


def gap_cells(gaps: Sequence[float]) -> list[str]:
    interval = Interval.of(gaps)
    ends = f"{interval.low:+,.4f} to {interval.high:+,.4f} (df {interval.df})" if interval else ""
    return [f"{mean(gaps):+,.4f}" if gaps else "", ends]
