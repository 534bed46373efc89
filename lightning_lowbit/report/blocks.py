"""The contents of a page about a run: sections of text, tables, charts and heat maps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


@dataclass(frozen=True)
class Text:
    """A paragraph; preformatted text keeps its line breaks and spaces."""

    text: str
    preformatted: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells. Columns of numbers are aligned to the right. Without a header, the first column is one."""

    header: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines over steps. Several charts in a row are drawn small, side by side.

    Args:
        title: above the chart.
        series: (xs, ys) by name. Values that are not finite leave a gap and are counted below the chart.
        y_label: the unit of the values.
        x_label: what the xs count.
        log: whether the y axis is logarithmic; it stays linear where a value is not positive.
        spans: (start, end, label) of shaded intervals.
        note: a remark below the chart.
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
    """A table of numbers of one kind. Worse values have stronger colors.

    Args:
        rows: names of the rows, such as layers; a common prefix is shown once.
        columns: names of the columns, such as operands.
        values: [rows][columns]; None leaves a cell empty. NaN and infinity are written as words, without a color.
        unit: of the values.
        low: where the color scale begins; lower values have the same color.
        high: where it ends, above ``low``.
        small_is_good: whether large values are bad, instead of small ones.
        caption: above the table.
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
    """Blocks under a title; ``is_alarming`` marks the section that readers must see first."""

    title: str
    blocks: Sequence[Block]
    is_alarming: bool = False
