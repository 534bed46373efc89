"""Charts of a report, as HTML and SVG without scripts.

    <div class="plot">      of any width; its contents have relative positions
      <svg>                 grid and lines, stretched to the plot; strokes and dots keep their widths
      <span class="x">      ticks, as text of constant size
      <div class="at">      a band of the plot that shows its values while the pointer is over it

If there are many points, neighbors share a band, which shows the range of their values.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from operator import itemgetter

from lightning_lowbit.report.blocks import Chart
from lightning_lowbit.report.formatting import common_parent, number, number_range, short_number

_LINES, _SPANS = 8, 4  # colors of the style sheet
FEW_POINTS = 30  # points of a series that also get dots
_MOST_DRAWN = 8000  # points of all series together: a page may have dozens of charts
_LARGEST = 1e300  # beyond it differences overflow
_FAR = 1000.0  # lengths of the axis, for what is cut off
_MOST_BANDS = {"single": 120, "multiples": 30}

_Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``, their base-10 logarithms if it is logarithmic."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Iterable[float], room: float, log: bool = False) -> "Axis":
        places = [_place(value, log) for value in values] or [0.0]
        low, high = min(places), max(places)
        is_constant = high - low <= 1e-12 * max(abs(low), abs(high), 1e-280)
        pad = (0.05 * abs(high) or 1.0) if is_constant else room * (high - low)
        return cls(low - pad, high + pad, log)

    def share(self, value: float) -> float:
        share = (_place(value, self.log) - self.low) / (self.high - self.low)
        return max(-_FAR, min(share, _FAR))

    def ticks(self, most: int, integer: bool = False) -> list[float]:
        low, high = self.low, self.high
        if self.log:
            decades = range(max(math.floor(low), -307), min(math.ceil(high), 307) + 1)
            factors = (1, 2, 5) if 3 * (high - low) < 2 * most else (1,)
            every = math.ceil(len(decades) / most)
            values = [factor * 10.0**decade for decade in decades[::every] for factor in factors]
            if len(values := [value for value in values if 0 <= self.share(value) <= 1]) > 1:
                return values
            low, high = 10.0**low, 10.0 ** min(high, 307)
        power = 10.0 ** math.floor(math.log10(step := (high - low) / most))
        sizes = [factor * power for factor in ((1, 2, 5, 10) if integer else (1, 2, 2.5, 5, 10))]
        step = next((size for size in sizes if size >= step), 10 * power)
        step = max(step, 1.0) if integer else step
        return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _place(value: float, log: bool) -> float:
    return math.log10(max(value, 1 / _LARGEST)) if log else max(-_LARGEST, min(value, _LARGEST))


def draw(chart: Chart, kind: str) -> str:
    """Draws a chart as a figure: of ``kind`` ``"single"``, as wide as the page, or ``"multiples"``, small."""
    title = f"<strong>{escape(chart.title)}</strong>" if chart.title else ""
    unit = f" <small>{escape(chart.y_label)}</small>" if chart.y_label else ""
    plot = _plot(chart, kind) if _values(chart) else '<p class="note">No value to show.</p>'
    note = f'<p class="note">{escape("; ".join(notes))}</p>' if (notes := remarks(chart)) else ""
    return f"<figure><figcaption>{title}{unit}{_legend(chart)}</figcaption>{plot}{note}</figure>"


def _values(chart: Chart) -> list[float]:
    return [y for _, ys in chart.series.values() for y in ys if math.isfinite(y)]


def y_axis(chart: Chart) -> Axis:
    """Returns the axis of the values and bands that are within the limits of a chart."""
    low, high = chart.limits
    sides = [ys for name, (_, ys) in chart.series.items() for ys in (ys, *chart.bands.get(name, ()))]
    values = [y for ys in sides for y in ys if math.isfinite(y) and low <= y <= high]
    return Axis.around(values, 0.05, chart.log and bool(values) and min(values) > 0)


def remarks(chart: Chart) -> list[str]:
    """Returns what the lines of a chart do not show: values that are not finite or cut off, and its note."""
    values, (low, high) = _values(chart), chart.limits
    notes = _not_finite(chart)
    if chart.log and values and not y_axis(chart).log:
        notes.append("The axis is linear: some values are not positive.")
    cuts = [f"below {number(low)}"] * any(y < low for y in values)
    cuts += [f"above {number(high)}"] * any(y > high for y in values)
    notes += [f"what is {' or '.join(cuts)} is cut off"] if cuts else []
    return notes + ([chart.note] if chart.note else [])


def _not_finite(chart: Chart) -> list[str]:
    series = chart.series.items()
    steps = {name: [x for x, y in zip(xs, ys, strict=True) if not math.isfinite(y)] for name, (xs, ys) in series}
    steps = {name: xs for name, xs in steps.items() if xs}
    if len(steps) > _LINES:
        steps = {f"{len(steps)} series": sorted(x for xs in steps.values() for x in xs)}
    label = "" if _is_named_by_title(chart) else "{}: "
    return [
        f"{label.format(name)}{len(xs)} value{'s' if len(xs) > 1 else ''} not finite, first at {chart.x_label} "
        f"{number(xs[0])}"
        for name, xs in steps.items()
    ]


def _legend(chart: Chart) -> str:
    colored, keys, parent = _colored(chart), [], ""
    if len(colored) < len(chart.series):
        parent = common_parent(list(chart.series))
        of = f" of {escape(parent)}" if parent else ""
        keys.append(f'<span class="key">{len(chart.series)} series{of}; lowest and highest in the end:</span>')
    for name, color in colored.items():
        short = escape(name.removeprefix(f"{parent}."))
        label = "" if _is_named_by_title(chart) else f'<i style="background:{color}"></i>{short} '
        ys = chart.series[name][1]
        keys.append(f'<span class="key">{label}<b>{number(ys[-1]) if len(ys) else ""}</b></span>')
    colors = _span_colors(chart)
    for start, end, name in chart.spans if colors else ():
        label = f'<i class="span" style="background:{colors[name]}"></i>{escape(name)}'
        keys.append(f'<span class="key phase">{label} {number(start)}–{number(end)}</span>')
    return "".join(keys)


def _is_named_by_title(chart: Chart) -> bool:
    return [*chart.series] == [chart.title]


def _colored(chart: Chart) -> dict[str, str]:
    """Colors the series of the legend: all, or, if there are many, those of the highest and lowest final values."""
    names = list(chart.series)
    if len(names) > _LINES:
        last = {name: ys[-1] for name, (_, ys) in chart.series.items() if len(ys) and math.isfinite(ys[-1])}
        names = list(dict.fromkeys([min(last, key=last.__getitem__), max(last, key=last.__getitem__)] if last else []))
    return {name: f"var(--c{i})" for i, name in enumerate(names)}


def _span_colors(chart: Chart) -> dict[str, str]:
    labels = list(dict.fromkeys(label for _, _, label in chart.spans))
    return {label: f"var(--p{i % _SPANS})" for i, label in enumerate(labels)} if len(labels) > 1 else {}


def _plot(chart: Chart, kind: str) -> str:
    is_single = kind == "single"
    series = {name: [*zip(xs, ys, strict=True)] for name, (xs, ys) in chart.series.items()}
    across = Axis.around([x for xs, _ in chart.series.values() for x in xs], 0.01, chart.x_log)
    up = y_axis(chart)
    counts = not up.log and all(float(y).is_integer() for y in _values(chart))
    x_ticks = across.ticks(8 if is_single else 4, integer=True)
    y_ticks = [(up.share(value), f"{value:g}") for value in up.ticks(6 if is_single else 4, integer=counts)]
    grid = "".join(f"M0 {1000 * (1 - y):.1f}h1000" for y, _ in y_ticks)
    spans, names = _spans(chart, across)
    colored, most = _colored(chart), max(20, _MOST_DRAWN // len(series))
    points: dict[str, _Points] = {name: [xy for xy in series[name] if math.isfinite(xy[1])] for name in colored}
    in_front = sorted(series, key=lambda name: name in colored)  # drawn last
    lines = [_band(chart, name, across, up, color) for name, color in colored.items() if name in chart.bands]
    lines += [_line(series[name], across, up, colored.get(name, ""), most) for name in in_front]
    label = escape(chart.title or ", ".join(chart.series))
    unit = f'<span class="unit">{escape(chart.x_label)}</span>' if is_single or chart.x_label != "step" else ""
    return (
        f'<div class="plot" style="margin-left:{1 + max((len(text) for _, text in y_ticks), default=0)}ch">'
        + "".join(f'<span class="x" style="left:{_percent(across.share(x))}">{short_number(x)}</span>' for x in x_ticks)
        + "".join(f'<span class="y" style="bottom:{_percent(y)}">{text}</span>' for y, text in y_ticks)
        + f'{unit}{names}<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{label}">'
        + f'{spans}<path class="grid" d="{grid}"/>{"".join(lines)}</svg>'
        + _bands(chart, points, across, up, _MOST_BANDS[kind])
        + "</div>"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _spans(chart: Chart, across: Axis) -> tuple[str, str]:
    colors, rectangles, labels = _span_colors(chart), [], []
    for start, end, label in chart.spans if colors else ():
        left, right = (min(max(across.share(x), 0.0), 1.0) for x in (start, end))
        shape = f'x="{1000 * left:.1f}" y="0" width="{1000 * (right - left):.1f}" height="1000"'
        rectangles.append(f'<rect {shape} style="fill:{colors[label]}"/>')
        place = f"left:{_percent(left)};width:{_percent(right - left)}"
        labels.append(f'<span class="name" style="{place}">{escape(label)}</span>')
    return "".join(rectangles), "".join(labels)


def _line(points: _Points, across: Axis, up: Axis, color: str, most: int) -> str:
    size = math.ceil(2 * len(points) / most) if len(points) > most else 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    path, dots, pen = "", "", "M"
    for x, y in (point for group in groups for point in (_extremes(group) or group[:1])):
        if not math.isfinite(y):
            pen = "M"
            continue
        place = f"{1000 * across.share(x):.1f} {1000 * (1 - up.share(y)):.1f}"
        path += f"{pen}{place}{'h0' if pen == 'M' else ''}"  # a point between gaps becomes a dot
        dots += f"M{place}h0"
        pen = "L"
    if not color:
        return f'<path class="faint" d="{path}"/>'
    drawn = f'<path style="stroke:{color}" d="{path}"/>'
    return drawn + (f'<path class="dots" style="stroke:{color}" d="{dots}"/>' if len(points) <= FEW_POINTS else "")


def _band(chart: Chart, name: str, across: Axis, up: Axis, color: str) -> str:
    """Fills the band of a series; that of a single x is a bar."""
    xs = chart.series[name][0]
    sides = [[*zip(xs, side, strict=True)] for side in chart.bands[name]]
    edge = [(x, y) for x, y in [*sides[0], *sides[1][::-1]] if math.isfinite(y)]
    places = "L".join(f"{1000 * across.share(x):.1f} {1000 * (1 - up.share(y)):.1f}" for x, y in edge)
    kind = "bar" if len({*xs}) == 1 else "band"
    return f'<path class="{kind}" style="fill:{color};stroke:{color}" d="M{places}Z"/>' if edge else ""


def _extremes(points: _Points) -> _Points:
    """Returns the lowest and highest of some points, in their order, so that no spike is lost."""
    height = itemgetter(1)
    finite = [point for point in points if math.isfinite(point[1])]
    return sorted({min(finite, key=height), max(finite, key=height)}) if finite else []


def _bands(chart: Chart, points: dict[str, _Points], across: Axis, up: Axis, most: int) -> str:
    xs = sorted({x for line in points.values() for x, _ in line})
    if not xs:
        return ""
    size = math.ceil(len(xs) / most)
    groups = [xs[start : start + size] for start in range(0, len(xs), size)]
    middles = [across.share((group[0] + group[-1]) / 2) for group in groups]
    edges = [0.0, *((a + b) / 2 for a, b in zip(middles, middles[1:], strict=False)), 1.0]
    colored, parent, bands = _colored(chart), common_parent(list(chart.series)), []
    for group, middle, left, right in zip(groups, middles, edges[:-1], edges[1:], strict=True):
        texts, dots = [f"{chart.x_label} {number_range(group)}"], ""
        for name, line in points.items():
            start = bisect_left(line, group[0], key=itemgetter(0))
            if inside := line[start : bisect_right(line, group[-1], key=itemgetter(0))]:
                label = "" if _is_named_by_title(chart) else f"{name.removeprefix(f'{parent}.')} "
                texts.append(label + number_range([y for _, y in inside]))
                for x, y in (point for point in _extremes(inside) if 0 <= up.share(point[1]) <= 1):
                    place = f"left:{_within(across.share(x), left, right)};bottom:{_percent(up.share(y))}"
                    dots += f'<b style="{place};background:{colored[name]}"></b>'
        marker = _within(middle, left, right)
        side = f"left:{marker}" if middle < 0.5 else f"right:{_within(left + right - middle, left, right)}"
        bands.append(
            f'<div class="at" style="left:{_percent(left)};width:{_percent(right - left)}">'
            f'<i style="left:{marker}"></i>{dots}'
            f'<span style="{side}">{"<br>".join(map(escape, texts))}</span></div>'
        )
    return "".join(bands)


def _within(share: float, left: float, right: float) -> str:
    return _percent((share - left) / (right - left))
