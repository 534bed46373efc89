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
    """Rows of cells; columns of numbers are aligned to the right. Without a header, the first column is one."""

    header: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines over steps; several charts in a row are drawn small, side by side.

    Args:
        title, note: text above and below the chart.
        series: (xs, ys) by name; values that are not finite leave a gap and are counted below the chart.
        y_label: unit of the values.
        x_label: what the xs count.
        log: whether the y axis is logarithmic; ignored if a value is not positive.
        spans: (start, end, label) of shaded intervals.
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
    """A table of numbers of one kind; worse values have stronger colors.

    Args:
        rows: names of the rows, such as layers; a common prefix is shown once.
        columns: names of the columns, such as operands.
        values: [rows][columns]; None leaves a cell empty. Values that are not finite have no color.
        unit: of the values.
        low, high: ends of the color scale.
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
    """Blocks under a title; sections that readers must see first have ``is_alarming``."""

    title: str
    blocks: Sequence[Block]
    is_alarming: bool = False
