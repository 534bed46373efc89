"""Charts of a page about a run, drawn by matplotlib as SVG.

matplotlib draws in light colors. What it writes is then taken apart: colors become CSS variables, so that the
reader's color scheme decides; namespaces, metadata and styles go; ids get a prefix, so that they do not clash with
those of another chart. Titles, legends and remarks are HTML around it, which wraps on a narrow screen.
"""

import io
import math
import re
from collections.abc import Sequence
from html import escape
from typing import Any
from xml.etree import ElementTree

from lightning_lowbit.report.blocks import Chart, common_parent, number
from lightning_lowbit.report.pointer import bands
from lightning_lowbit.report.style import GRID, INK, LINES, SPANS, VARIABLES

_FEW = 30  # so many points are drawn as points, too
_MOST_DRAWN = 8000  # points of many series together: a page may have dozens of such charts
# Sizes in CSS pixels, at which a chart is drawn and about which it is shown: text in it must not shrink on a phone.
_MOST_BANDS = {"wide": 120, "narrow": 40, "all": 30}  # in which the pointer finds values
_SIZES = {"single": {"wide": (920, 300), "narrow": (390, 250)}, "multiples": {"all": (330, 180)}}


def draw(chart: Chart, prefix: str, kind: str) -> str:
    """A chart as a figure, for a ``prefix`` of ids that is its own.

    Args:
        chart: what to draw.
        prefix: of ids in the SVG.
        kind: ``"single"``, twice: for wide and narrow screens; or ``"multiples"``, small.
    """
    values = [y for _, ys in chart.series.values() for y in ys if math.isfinite(y)]
    log = chart.log and bool(values) and min(values) > 1e-99 and max(values) < 1e99  # or matplotlib overflows
    notes = _not_finite(chart)
    if chart.log and values and not log:
        notes.append("The axis is linear: some values are not positive, or beyond 1e±99.")
    notes += [chart.note] if chart.note else []
    drawings = [_svg(chart, log, kind, name, prefix) for name in _SIZES[kind] if values] or [
        '<p class="note">No value to show.</p>'
    ]
    title = f"<strong>{escape(chart.title)}</strong>" if chart.title else ""
    unit = f" <small>{escape(chart.y_label)}</small>" if chart.y_label else ""
    remarks = f'<p class="note">{escape("; ".join(notes))}</p>' if notes else ""
    caption = f"<figcaption>{title}{unit}{_legend(chart)}</figcaption>"
    return f"<figure>{caption}{''.join(drawings)}{remarks}</figure>"


def _not_finite(chart: Chart) -> list[str]:
    steps = {
        name: [x for x, y in zip(xs, ys, strict=True) if not math.isfinite(y)]
        for name, (xs, ys) in chart.series.items()
    }
    steps = {name: found for name, found in steps.items() if found}
    if len(steps) > len(LINES):
        steps = {f"{len(steps)} series": sorted(x for found in steps.values() for x in found)}
    return [
        ("" if [*chart.series] == [chart.title] else f"{name}: ")
        + f"{len(found)} value{'s' if len(found) > 1 else ''} not finite, first at {chart.x_label} {number(found[0])}"
        for name, found in steps.items()
    ]


def _legend(chart: Chart) -> str:
    last = {name: ys[-1] for name, (_, ys) in chart.series.items() if len(ys)}
    colored, keys, common = _colored(chart), [], ""
    if len(colored) < len(chart.series):
        common = common_parent(list(chart.series))
        of = f" of {escape(common)}" if common else ""
        keys.append(f'<span class="key">{len(chart.series)} series{of}; lowest and highest in the end:</span>')
    for name, color in colored.items():
        short = escape(name.removeprefix(f"{common}."))
        label = (
            "" if [*chart.series] == [chart.title] else f'<i style="background:var({VARIABLES[color]})"></i>{short} '
        )
        keys.append(f'<span class="key">{label}<b>{number(last[name]) if name in last else ""}</b></span>')
    colors = _span_colors(chart)
    for start, end, name in chart.spans if len(colors) > 1 else ():
        label = f'<i class="span" style="background:var({VARIABLES[colors[name]]})"></i>{escape(name)}'
        keys.append(f'<span class="key phase">{label} {number(start)}–{number(end)}</span>')
    return "".join(keys)


def _colored(chart: Chart) -> dict[str, str]:
    """Colors of the series that the legend names: all, or of many those that are lowest and highest in the end."""
    if len(chart.series) <= len(LINES):
        return dict(zip(chart.series, LINES, strict=False))
    last = {name: ys[-1] for name, (_, ys) in chart.series.items() if len(ys) and math.isfinite(ys[-1])}
    ends = [choose(last, key=lambda name: last[name]) for choose in (min, max)] if last else []
    return dict(zip(dict.fromkeys(ends), LINES, strict=False))


def _thin(xs: Sequence[float], ys: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """At most so many points: lowest and highest of neighbors, so that no spike is lost. NaN where all of them are."""
    size = max(1, math.ceil(2 * len(xs) / most))
    kept: list[int] = []
    for start in range(0, len(xs), size):
        indices = range(start, min(start + size, len(xs)))
        finite = [i for i in indices if not math.isnan(ys[i])] or [start]
        kept += sorted({min(finite, key=lambda i: ys[i]), max(finite, key=lambda i: ys[i])})
    return [xs[i] for i in kept], [ys[i] for i in kept]


def _span_colors(chart: Chart) -> dict[str, str]:
    labels = list(dict.fromkeys(label for _, _, label in chart.spans))
    return {label: SPANS[i % len(SPANS)] for i, label in enumerate(labels)}


def _svg(chart: Chart, log: bool, kind: str, css_class: str, prefix: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    width, height = _SIZES[kind][css_class]
    prefix = f"{prefix}-{css_class}"
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the reader's matplotlibrc says
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": prefix, "font.size": 10})
        figure = Figure(
            figsize=(width / 72, height / 72), dpi=72, layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02)
        )
        axes = figure.add_subplot()
        colored = _colored(chart)
        many = len(colored) < len(chart.series)
        for i, (name, (xs, ys)) in enumerate(chart.series.items()):
            finite: Sequence[float] = [y if math.isfinite(y) else math.nan for y in ys]
            if many:
                xs, finite = _thin(xs, finite, max(20, _MOST_DRAWN // len(chart.series)))
            style: dict[str, Any] = {"marker": "o", "markersize": 3} if len(xs) <= _FEW and not many else {}
            if name in colored:
                style |= {"color": colored[name], "linewidth": 1.2, "zorder": 4 + i / 1000}
            else:
                style |= {"color": INK, "linewidth": 0.6, "alpha": 0.3, "zorder": 3}
            axes.plot(xs, finite, **style)
        if log:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,), numticks=6))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            counts = all(float(y).is_integer() for _, ys in chart.series.values() for y in ys)
            axes.yaxis.set_major_locator(MaxNLocator(max(5, height // 40), steps=(1, 2, 2.5, 5, 10), integer=counts))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(max(4, width // 110), steps=(1, 2, 5, 10), integer=True))
        axes.margins(x=0.01)
        colors = _span_colors(chart)
        left, right = axes.get_xlim()
        for start, end, label in chart.spans if len(colors) > 1 else ():
            axes.axvspan(start, end, color=colors[label], linewidth=0, zorder=0)
            is_wide = (end - start) / (right - left) * width > 8 * len(label)
            if kind == "single" and is_wide:  # the legend names all
                place = {"transform": axes.get_xaxis_transform(), "va": "bottom", "parse_math": False}
                axes.text(max(start, left), 1, label, color=INK, **place)  # type: ignore[arg-type]
        axes.set_xlim(left, right)
        if kind == "single" or chart.x_label != "step":
            axes.set_xlabel(chart.x_label, loc="right", color=INK, parse_math=False)
        axes.tick_params(length=0, labelcolor=INK)
        axes.grid(axis="y", color=GRID, linewidth=0.8, zorder=1)
        axes.set_axisbelow(True)
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        axes.patch.set_visible(False)
        figure.patch.set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        pointed = bands(chart, colored, axes, _MOST_BANDS[css_class])
    return _inline(buffer.getvalue(), prefix, css_class, chart.title or ", ".join(chart.series), pointed)


_DIGITS = re.compile(r"(\d\.\d)\d+")  # beyond a tenth of a pixel


def _inline(svg: bytes, prefix: str, css_class: str, title: str, pointed: str) -> str:
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        element.attrib.clear()
        for name, value in attributes.items():
            if name == "id":
                value = f"{prefix}-{value}"
            elif name in ("href", "clip-path"):
                value = value.replace("#", f"#{prefix}-")
            elif name == "d":
                value = _DIGITS.sub(r"\1", value)
            elif name == "style":
                for light, variable in VARIABLES.items():
                    value = value.replace(light, f"var({variable})")
            element.set(name, value)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib.update({"class": css_class, "role": "img", "aria-label": title})
    return ElementTree.tostring(root, encoding="unicode").removesuffix("</svg>") + pointed + "</svg>"
