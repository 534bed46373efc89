"""Numbers, durations and names as a report shows them."""

import math
import os
import re
from collections.abc import Iterable, Sequence

from lightning_lowbit.checks import is_number


def number(value: float) -> str:
    """Formats a number with four digits, or an integer with all of them.

    Examples:
        >>> number(1234567), number(1.23456), number(12345.6), number(1e-7), number(math.nan)
        ('1,234,567', '1.235', '12,346', '1e-07', 'not finite')
    """
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:,.4g}"


def number_range(values: Sequence[float]) -> str:
    """Returns the lowest and the highest number, or one number if they look the same."""
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} – {high}"


def short_number(value: float) -> str:
    """Returns a tick of an axis: ``1500`` as ``1.5k``."""
    for suffix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def needs_log_axis(values: Iterable[float]) -> bool:
    """Tells whether a linear axis would show only the largest of some values."""
    finite = list(filter(math.isfinite, values))
    return bool(finite) and max(finite) > 20 * min(finite) > 0


def cell(value: object) -> str:
    return number(value) if is_number(value) else str(value)  # type: ignore[arg-type]


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def common_parent(names: Sequence[str]) -> str:
    """Returns the common dotted prefix: ``model.layers`` of ``model.layers.0`` and ``model.layers.1``."""
    return os.path.commonprefix(list(names)).rpartition(".")[0] if len(names) > 1 else ""


def without_numbers(name: str) -> str:
    """Returns what names have in common that differ only in numbers: ``layers.*.up``."""
    return re.sub(r"\d+", "*", name)


def by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups names that differ only in numbers, by what :func:`name_range` makes of them."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(without_numbers(name), []).append(name)
    return {name_range(members): members for members in kinds.values()}


def name_range(names: Sequence[str]) -> str:
    """Joins names that differ only in numbers: ``layers.0.up`` … ``layers.7.up`` to ``layers.{0-7}.up``."""
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)

    def part(texts: tuple[str, ...]) -> str:
        return texts[0] if len(set(texts)) == 1 else f"{{{_runs(sorted(set(map(int, texts))))}}}"

    return "".join(map(part, columns))


def _runs(numbers: list[int]) -> str:
    """Writes 0, 2, 3, 4, 5 as ``0,2-5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
