"""What a page about a run consists of: sections of text, tables, charts and heat maps."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


@dataclass(frozen=True)
class Text:
    """A paragraph, or, preformatted, text whose line breaks and spaces count."""

    text: str
    preformatted: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells; columns of numbers are aligned to the right. Without a header, the first column is one."""

    header: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines over steps. Several charts in a row become small ones side by side.

    Args:
        title: what is shown.
        series: (xs, ys) by name. Values that are not finite leave a gap, and are counted below the chart.
        y_label: the unit.
        x_label: what xs count.
        log: a logarithmic y axis, where all values are positive.
        spans: (start, end, label), shaded.
        note: said below.
    """

    title: str
    series: Series
    y_label: str = ""
    x_label: str = "step"
    log: bool = False
    spans: Sequence[tuple[float, float, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class HeatMap:
    """A table of numbers of one kind whose cells are colored, the more the worse.

    Args:
        rows: what there may be hundreds of, such as names of layers. What all names begin with is shown once.
        columns: what there are few of, such as operands.
        values: [rows][columns]; None where there is none. What is not finite is said in words, without a color.
        unit: of the values.
        low: where the scale of colors begins; a value below has the same color.
        high: where it ends, above ``low``.
        small_is_good: whether colors warn of large values, instead of small ones.
        caption: what is shown.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    unit: str = ""
    low: float = 0.0
    high: float = 1.0
    small_is_good: bool = False
    caption: str = ""


Block = Text | Table | Chart | HeatMap


@dataclass(frozen=True)
class Section:
    """Blocks under a title; ``is_alarming`` marks what is to be seen first."""

    title: str
    blocks: Sequence[Block]
    is_alarming: bool = False


def number(value: float) -> str:
    """A number to be read: four digits, or all digits of an integer."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "not finite"
    if 1e4 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:,.4g}"


def common_parent(names: Sequence[str]) -> str:
    """The dotted name that all names begin with: ``model.layers`` of ``model.layers.0`` and ``model.layers.1``."""
    return os.path.commonprefix(list(names)).rpartition(".")[0] if len(names) > 1 else ""
