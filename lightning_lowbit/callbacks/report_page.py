"""A page about a run as one HTML file: titled sections of text, tables and charts, and nothing to fetch.

    page = render("my run", [Section("Loss", [Chart("loss", {"training": ([1, 2, 3], [2.5, 2.2, 2.1])})])])

matplotlib draws a chart as SVG, in light colours. What it writes is then taken apart: colours become CSS variables, so
that the reader's colour scheme decides; namespaces, metadata and styles go; ids get a prefix, so that they do not clash
with those of another chart. Titles, legends and remarks are HTML around it, which wraps on a narrow screen.

Everything that comes from outside is escaped, and what fails in one section is shown there and leaves the others alone.
"""

import io
import math
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, zip_longest
from typing import Any
from xml.etree import ElementTree

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
    """

    title: str
    series: Series
    y_label: str = ""
    x_label: str = "step"
    log: bool = False
    spans: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True)
class Section:
    """Blocks under a title."""

    title: str
    blocks: Sequence[Text | Table | Chart]


def render(
    title: str,
    sections: Iterable[Section],
    *,
    status: str = "",
    lead: str = "",
    facts: Iterable[tuple[str, str, str]] = (),
) -> str:
    """The page.

    Args:
        title: of the page.
        sections: in their order.
        status: a word beside the title; ``"finished"``, ``"interrupted"`` and ``"failed"`` have colours.
        lead: a sentence below the title.
        facts: (label, value, remark): what is to be seen at once.
    """
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for label, value, remark in facts
    )
    body = "\n".join(_section(section, f"s{i}") for i, section in enumerate(sections))
    badge = f'<span class="status {escape(status)}">{escape(status)}</span>' if status else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}{badge}</h1>
<p class="lead">{escape(lead)}</p>
<dl>{cells}</dl>
</header>
{body}
</body>
</html>
"""


def number(value: float) -> str:
    """A number to be read: four digits, or all digits of an integer."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "not finite"
    if 1e4 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:,.4g}"


# --- blocks -----------------------------------------------------------------------------------------------------------


_NUMBER = re.compile(r"([-+]?\d[\d.,]*(e[-+]?\d+)?( ?[^\s\d]{1,8})?|not finite|)")  # with a unit, or nothing


def _section(section: Section, prefix: str) -> str:
    title = str(getattr(section, "title", type(section).__name__))
    try:
        body = _blocks(section.blocks, prefix)
    except Exception:
        body = _text(Text("This section could not be shown.")) + _text(Text(traceback.format_exc(), preformatted=True))
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def _blocks(blocks: Sequence[Text | Table | Chart], prefix: str) -> str:
    parts = []
    for is_chart, group in groupby(enumerate(blocks), key=lambda pair: isinstance(pair[1], Chart)):
        members = list(group)
        if not is_chart:
            parts += [_table(block) if isinstance(block, Table) else _text(block) for _, block in members]  # type: ignore[arg-type]
        else:
            kind = "single" if len(members) == 1 else "multiples"
            figures = "\n".join(_figure(chart, f"{prefix}-{i}", kind) for i, chart in members)  # type: ignore[arg-type]
            parts.append(f'<div class="{kind}">\n{figures}\n</div>')
    return "\n".join(parts)


def _text(block: Text) -> str:
    tag = "pre" if block.preformatted else "p"
    return f"<{tag}>{escape(block.text)}</{tag}>"


def _table(table: Table) -> str:
    def show(value: Any) -> str:
        return number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)

    def row(cells: Sequence[str], first: str, others: str) -> str:
        tags = [others if i else first for i in range(len(cells))]
        aligned = [' class="number"' if i in numeric else "" for i in range(len(cells))]
        filled = zip(tags, aligned, cells, strict=True)
        return (
            "<tr>" + "".join(f"<{tag}{css_class}>{escape(cell)}</{tag}>" for tag, css_class, cell in filled) + "</tr>"
        )

    rows = [[show(value) for value in values] for values in table.rows]
    columns = zip_longest(*rows, fillvalue="") if table.header else ()
    numeric = {i for i, column in enumerate(columns) if all(_NUMBER.fullmatch(cell) for cell in column)}
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    head = f"<thead>{row([str(name) for name in table.header], 'th', 'th')}</thead>" if table.header else ""
    body = "".join(row(cells, "td" if table.header else "th", "td") for cells in rows)
    kind = "" if table.header else ' class="pairs"'
    return f'<div class="scroll"><table{kind}>{caption}{head}<tbody>{body}</tbody></table></div>'


# --- charts -----------------------------------------------------------------------------------------------------------

# In the light and in the dark scheme. What matplotlib draws in a light colour becomes the variable.
_INK, _GRID = "#5c6066", "#dcdfe3"
_LINES = ("#1f63b0", "#c2540a", "#2b7d4f", "#8a4fb5", "#b1283f", "#0b7d8a", "#8b6a00", "#6b6f76")
_SPANS = ("#f5f6f8", "#fbeee3", "#e8f4ec", "#f0ebf8")
_DARK = {
    **dict(zip((_INK, _GRID), ("#9aa1ab", "#2c3138"), strict=True)),
    **dict(
        zip(
            _LINES,
            ("#6aabf2", "#f0944d", "#62c48d", "#c69bec", "#f0798c", "#4cc3d1", "#d8b548", "#a3a9b3"),
            strict=True,
        )
    ),
    **dict(zip(_SPANS, ("#191c20", "#33251a", "#18291f", "#2a2033"), strict=True)),
}
_VARIABLES = {light: f"--c{i}" for i, light in enumerate(_DARK)}
_FEW = 30  # so many points are drawn as points, too
# Sizes in CSS pixels, at which a chart is drawn and about which it is shown: text in it must not shrink on a phone.
_SIZES = {"single": {"wide": (920, 300), "narrow": (390, 250)}, "multiples": {"all": (330, 180)}}


def _figure(chart: Chart, prefix: str, kind: str) -> str:
    values = [y for _, ys in chart.series.values() for y in ys if math.isfinite(y)]
    log = chart.log and bool(values) and min(values) > 1e-99 and max(values) < 1e99  # or matplotlib overflows
    notes = _not_finite(chart)
    if chart.log and values and not log:
        notes.append("The axis is linear: some values are not positive, or beyond 1e±99.")
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
    if len(steps) > len(_LINES):
        steps = {f"{len(steps)} series": sorted(x for found in steps.values() for x in found)}
    return [
        ("" if name == chart.title else f"{name}: ")
        + f"{len(found)} value{'s' if len(found) > 1 else ''} not finite, first at {chart.x_label} {number(found[0])}"
        for name, found in steps.items()
    ]


def _legend(chart: Chart) -> str:
    last = {name: ys[-1] for name, (_, ys) in chart.series.items() if len(ys)}
    if _has_many(chart):
        low, high = min(last, key=lambda name: last[name]), max(last, key=lambda name: last[name])
        text = f"{len(last)} series, in the end from {number(last[low])} ({low}) to {number(last[high])} ({high})"
        return f'<span class="key">{escape(text)}</span>'
    keys = []
    for colour, name in zip(_LINES, chart.series, strict=False):
        label = "" if name == chart.title else f'<i style="background:var({_VARIABLES[colour]})"></i>{escape(name)} '
        keys.append(f'<span class="key">{label}<b>{number(last[name]) if name in last else ""}</b></span>')
    colours = _span_colours(chart)
    for start, end, name in chart.spans if len(colours) > 1 else ():
        label = f'<i class="span" style="background:var({_VARIABLES[colours[name]]})"></i>{escape(name)}'
        keys.append(f'<span class="key phase">{label} {number(start)}–{number(end)}</span>')
    return "".join(keys)


def _has_many(chart: Chart) -> bool:
    """Whether there are too many series for colours, or too long names for a legend."""
    return len(chart.series) > len(_LINES) or sum(map(len, chart.series)) > 160


def _span_colours(chart: Chart) -> dict[str, str]:
    labels = list(dict.fromkeys(label for _, _, label in chart.spans))
    return {label: _SPANS[i % len(_SPANS)] for i, label in enumerate(labels)}


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
        figure = Figure(figsize=(width / 72, height / 72), layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02))
        axes = figure.add_subplot()
        many = _has_many(chart)
        for i, (xs, ys) in enumerate(chart.series.values()):
            finite = [y if math.isfinite(y) else math.nan for y in ys]
            style: dict[str, Any] = {"marker": "o", "markersize": 3} if len(xs) <= _FEW and not many else {}
            look = (_LINES[0], 0.7, 0.5) if many else (_LINES[i], 1.2, 1.0)
            axes.plot(xs, finite, color=look[0], linewidth=look[1], alpha=look[2], zorder=3 + i / 1000, **style)
        if log:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,), numticks=6))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(max(4, width // 110), steps=(1, 2, 5, 10), integer=True))
        axes.margins(x=0.01)
        colours = _span_colours(chart)
        left, right = axes.get_xlim()
        for start, end, label in chart.spans if len(colours) > 1 else ():
            axes.axvspan(start, end, color=colours[label], linewidth=0, zorder=0)
            is_wide = (end - start) / (right - left) * width > 8 * len(label)
            if kind == "single" and is_wide:  # the legend names all
                place = {"transform": axes.get_xaxis_transform(), "va": "bottom", "parse_math": False}
                axes.text(max(start, left), 1, label, color=_INK, **place)  # type: ignore[arg-type]
        axes.set_xlim(left, right)
        if kind == "single" or chart.x_label != "step":
            axes.set_xlabel(chart.x_label, loc="right", color=_INK, parse_math=False)
        axes.tick_params(length=0, labelcolor=_INK)
        axes.grid(axis="y", color=_GRID, linewidth=0.8, zorder=1)
        axes.set_axisbelow(True)
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.spines["bottom"].set_color(_GRID)
        axes.patch.set_visible(False)
        figure.patch.set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(buffer.getvalue(), prefix, css_class, chart.title or ", ".join(chart.series))


def _inline(svg: bytes, prefix: str, css_class: str, title: str) -> str:
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
            elif name == "style":
                for light, variable in _VARIABLES.items():
                    value = value.replace(light, f"var({variable})")
            element.set(name, value)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib.update({"class": css_class, "role": "img", "aria-label": title})
    return ElementTree.tostring(root, encoding="unicode")


_STYLE = (
    "\n:root{color-scheme:light dark;--page:#fff;--ink:#1b1d20;--soft:#5c6066;--rule:#e3e5e8;--box:#f6f7f8;"
    "--good:#2b7d4f;--fair:#9a6200;--bad:#b1283f;"
    + "".join(f"{variable}:{light};" for light, variable in _VARIABLES.items())
    + "}\n@media screen and (prefers-color-scheme:dark){:root{--page:#131518;--ink:#e4e6e9;--soft:#9aa1ab;"
    "--rule:#2c3138;--box:#1b1e22;--good:#62c48d;--fair:#e0ac4a;--bad:#f0798c;"
    + "".join(f"{variable}:{_DARK[light]};" for light, variable in _VARIABLES.items())
    + "}}"
    + """
*{box-sizing:border-box}
body{margin:0 auto;padding:2.5rem 1.25rem 4rem;max-width:62rem;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.75rem;line-height:1.2;font-weight:650;letter-spacing:-.01em;margin:0;overflow-wrap:anywhere}
h2{font-size:1.05rem;font-weight:650;margin:2.75rem 0 .75rem;padding-top:.6rem;border-top:1px solid var(--rule)}
p{margin:.5rem 0;max-width:46rem;color:var(--soft);overflow-wrap:anywhere}
.lead{margin:.4rem 0 1.5rem;color:var(--ink)}
.status{margin-left:.75rem;font-size:.8rem;font-weight:600;letter-spacing:0;vertical-align:.35em;color:var(--soft)}
.status.finished{color:var(--good)}.status.interrupted{color:var(--fair)}.status.failed{color:var(--bad)}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(10.5rem,1fr));gap:1.1rem 1.5rem;margin:0}
dt{color:var(--soft);font-size:.8rem}
dd{margin:0;font-size:1.3rem;line-height:1.3;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
dd small{display:block;font-size:.8rem;color:var(--soft)}
figure{margin:0;min-width:0}
.multiples{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(18rem,100%),1fr));gap:1.5rem 1.75rem}
figcaption{margin-bottom:.35rem;overflow-wrap:anywhere;font-size:.85rem}
figcaption strong{font-weight:600;margin-right:.6rem}
figcaption small,.key,.note{color:var(--soft);font-size:.8rem}
.key{display:inline-block;margin-right:.9rem;font-variant-numeric:tabular-nums}
.key b{font-weight:500;color:var(--ink)}
.key i{display:inline-block;width:.9rem;height:.18rem;margin-right:.35rem;vertical-align:.22rem}
.key i.span{height:.8rem;vertical-align:-.1rem;border:1px solid var(--rule)}
.multiples .phase,.narrow{display:none}
.note{margin:.25rem 0 0}
svg{display:block;width:100%;height:auto}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif!important}
.scroll{overflow-x:auto;margin:.5rem 0 1rem}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding-bottom:.35rem}
th,td{text-align:left;vertical-align:top;padding:.28rem 1.25rem .28rem 0;border-bottom:1px solid var(--rule)}
th{font-weight:500;color:var(--soft)}
th,table:not(.pairs) td{white-space:nowrap}.pairs td{overflow-wrap:anywhere}
.number{text-align:right}
pre{margin:.5rem 0;padding:.8rem 1rem;max-height:30rem;overflow:auto;background:var(--box);border-radius:4px;
 font:.8rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
@media (max-width:38rem){body{padding-top:1.5rem}.wide{display:none}.narrow{display:block}
 dl{grid-template-columns:repeat(2,minmax(0,1fr))}dd{font-size:1.15rem}}
@media print{body{max-width:none;padding:0;font-size:12px}pre{max-height:none;white-space:pre-wrap}
 figure,tr{break-inside:avoid}h2{break-after:avoid}.scroll{overflow:visible}}
"""
)
