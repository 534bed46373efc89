"""The contents of a page about a run: sections of text, tables, charts and heat maps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


@dataclass(frozen=True)
class Text:
    """A paragraph; preformatted text keeps its line breaks and spaces."""

    text: str
    preformatted: bool = False


@dataclass(frozen=True)
class Link:
    """A cell of a table that leads to an address; its text alone where there are no links."""

    text: str
    address: str  # escaped as in URLs, and relative to the page

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """Rows of cells; columns of numbers are aligned to the right. Without a header, the first column is one."""

    header: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines over steps; several charts in a row are drawn small, side by side."""

    title: str
    series: Series  # (xs, ys) by name; values that are not finite leave a gap and are counted below the chart
    y_label: str = ""  # unit of the values
    x_label: str = "step"  # the unit of the xs
    log: bool = False  # whether the y axis is logarithmic; ignored if a value is not positive
    spans: Sequence[tuple[float, float, str]] = ()  # (start, end, label) of shaded intervals
    note: str = ""  # below the chart
    bands: Series = field(default_factory=dict)  # (lows, highs) at the xs of a series, by its name
    limits: tuple[float, float] = (-inf, inf)  # of the y axis; what is beyond is cut off
    x_log: bool = False  # whether the x axis is logarithmic
    rows: Sequence[str] = ()  # names of the xs 1, 2, …: rows of a picture


@dataclass(frozen=True)
class HeatMap:
    """A table of numbers of one kind, in ``unit``; worse values have stronger colors, from ``low`` to ``high``."""

    rows: Sequence[str]  # names, such as layers; a common prefix is shown once
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]  # None leaves a cell empty; values that are not finite have no color
    unit: str = ""
    low: float = 0.0
    high: float = 1.0
    small_is_good: bool = False
    caption: str = ""


Block = Text | Table | Chart | HeatMap


@dataclass(frozen=True)
class Section:
    """Blocks under a title; readers must see an alarming one first, and open a folded one."""

    title: str
    blocks: Sequence[Block]
    is_alarming: bool = False
    is_folded: bool = False
