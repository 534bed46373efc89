"""Values under the pointer, in a chart as SVG without a script: a style sheet shows what belongs to a band.

    <g class="at">  a band of the chart        :hover shows the rest of it
        <rect>      invisible, as high as the chart
        <path>      where it is
        <circle>    the values there
        <text>      what they are

Neighbors share a band where there are too many, which then says from where to where the values go.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lightning_lowbit.report.blocks import Chart, common_parent, number
from lightning_lowbit.report.style import VARIABLES


def bands(chart: Chart, colored: Mapping[str, str], axes: Any, most: int) -> str:
    """The bands of a chart.

    Args:
        chart: what was drawn.
        colored: the series that have names in the legend, and their colors.
        axes: of matplotlib, after they were drawn with 72 dots per inch.
        most: how many bands there may be.
    """
    points = {name: [(x, y) for x, y in zip(*chart.series[name], strict=True) if math.isfinite(y)] for name in colored}
    xs = sorted({x for of_one in points.values() for x, _ in of_one})
    size = math.ceil(len(xs) / most)
    groups = [xs[start : start + size] for start in range(0, len(xs), size)] if xs else []
    box = axes.get_window_extent()
    height = axes.figure.bbox.height
    top, bottom = height - box.y1, height - box.y0

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y))
        return across, height - up

    middles = [place((group[0] + group[-1]) / 2, 1.0)[0] for group in groups]
    edges = [box.x0, *((a + b) / 2 for a, b in zip(middles, middles[1:], strict=False)), box.x1]
    common = common_parent(list(chart.series))
    parts = []
    for i, (group, middle) in enumerate(zip(groups, middles, strict=True)):
        told, dots = [f"{chart.x_label} {_range(group)}"], []
        for name, color in colored.items():
            found = _within(points[name], group)
            if found:
                label = "" if [*chart.series] == [chart.title] else f"{name.removeprefix(f'{common}.')} "
                told.append(f"{label}{_range([y for _, y in found])}")
                ends = {min(found, key=_height), max(found, key=_height)}
                dots += [_dot(x - middle, y, color) for x, y in (place(*end) for end in ends)]
        x = 'x="6"' if middle < (box.x0 + box.x1) / 2 else 'x="-6"'
        rest = "".join(f'<tspan {x} dy="14">{escape(text)}</tspan>' for text in told[1:])
        anchor = "" if x == 'x="6"' else ' text-anchor="end"'
        parts.append(
            f'<g class="at" transform="translate({middle:.1f})"><rect x="{edges[i] - middle:.1f}" y="{top:.0f}" '
            f'width="{max(edges[i + 1] - edges[i], 0):.1f}" height="{bottom - top:.0f}"/>'
            f'<path d="M0 {top:.0f}V{bottom:.0f}"/>{"".join(dots)}'
            f'<text {x} y="{top + 12:.0f}"{anchor}>{escape(told[0])}{rest}</text></g>'
        )
    return "".join(parts)


def _within(points: Sequence[tuple[float, float]], group: Sequence[float]) -> Sequence[tuple[float, float]]:
    """The points of a series in a band; they are in the order of x."""
    start = bisect_left(points, group[0], key=lambda point: point[0])
    return points[start : bisect_right(points, group[-1], key=lambda point: point[0])]


def _height(point: tuple[float, float]) -> float:
    return point[1]


def _range(values: Sequence[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} – {high}"


def _dot(x: float, y: float, color: str) -> str:
    across = f'cx="{x:.1f}" ' if abs(x) >= 0.05 else ""
    return f'<circle {across}cy="{y:.1f}" r="3.5" fill="var({VARIABLES[color]})"/>'
