"""A report as one HTML file that fetches nothing: titled sections of text, tables, charts and heat maps.

An error in one section is shown there and leaves the other sections alone.
"""

import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby

from lightning_lowbit.report.blocks import Block, Chart, HeatMap, Section, Table, Text
from lightning_lowbit.report.charts import draw
from lightning_lowbit.report.formatting import common_parent, number
from lightning_lowbit.report.tables import as_html, framed

__all__ = ["Block", "Chart", "HeatMap", "Section", "Table", "Text", "number", "render"]

_STYLE = files(__package__).joinpath("style.css").read_text()
_HEAT_COLORS = 7  # of the style sheet


def render(
    title: str,
    sections: Iterable[Section],
    *,
    status: str = "",
    lead: str = "",
    facts: Iterable[tuple[str, str, str]] = (),
) -> str:
    """Returns the page as HTML.

    ``status`` is a word next to the title (``"finished"``, ``"interrupted"`` and ``"failed"`` have colors), ``lead`` a
    sentence below it, ``facts`` the (label, value, remark) of the numbers at the top.
    """
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for label, value, remark in facts
    )
    body = "\n".join(map(_section, sections))
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


def _section(section: Section) -> str:
    title = str(getattr(section, "title", type(section).__name__))
    try:
        body = _blocks(section.blocks)
    except Exception:
        body = _text(Text("This section could not be shown.")) + _text(Text(traceback.format_exc(), preformatted=True))
    mark = ' class="alarming"' if getattr(section, "is_alarming", False) else ""
    head = f"<h2>{escape(title)}</h2>"
    if getattr(section, "is_folded", False):
        return f"<section{mark}>\n<details><summary>{head}</summary>\n{body}\n</details>\n</section>"
    return f"<section{mark}>\n{head}\n{body}\n</section>"


def _blocks(blocks: Sequence[Block]) -> str:
    parts = []
    for is_chart, group in groupby(blocks, key=lambda block: isinstance(block, Chart)):
        members = list(group)
        if not is_chart:
            parts += [_DRAWS[type(block)](block) for block in members]
        else:
            kind = "single" if len(members) == 1 else "multiples"
            figures = "\n".join(draw(chart, kind) for chart in members)  # type: ignore[arg-type]
            parts.append(f'<div class="{kind}">\n{figures}\n</div>')
    return "\n".join(parts)


def _text(block: Text) -> str:
    tag = "pre" if block.preformatted else "p"
    return f"<{tag}>{escape(block.text)}</{tag}>"


_WORDS = {"nan": "not a number", "inf": "infinite", "-inf": "minus infinite"}


def _heat_map(block: HeatMap) -> str:
    low, high = block.low, block.high
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"The color scale of a HeatMap needs finite low < high; got {low=}, {high=}.")
    decimals = max(0, 2 - math.floor(math.log10(high - low)))  # a few hundred distinct values on the scale

    def show(value: float) -> str:
        text = f"{round(value, decimals) + 0.0:.{decimals}f}"  # no -0.0
        return text if len(text) <= 8 else number(value)

    def cell(value: float | None) -> str:
        if value is None:
            return "<td></td>"
        if not math.isfinite(value):
            return f'<td class="words">{_WORDS[str(float(value))]}</td>'
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        step = min(int((share if block.small_is_good else 1 - share) * _HEAT_COLORS), _HEAT_COLORS - 1)
        return f'<td class="h{step}">{show(value)}</td>'

    common = common_parent(block.rows)
    columns = "".join(f"<th>{escape(name)}</th>" for name in block.columns)
    lines = [f"<tr><th>{escape(common)}{'.…' if common else ''}</th>{columns}</tr>"]
    for name, values in zip(block.rows, block.values, strict=True):
        cells = "".join(cell(value) for _, value in zip(block.columns, values, strict=True))
        lines.append(f'<tr><th title="{escape(name)}">{escape(name.removeprefix(f"{common}."))}</th>{cells}</tr>')
    table = f"<table><thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table>"
    return framed(table, f"{escape(block.caption)} {_scale(block)}", "table heat")


def _scale(block: HeatMap) -> str:
    steps, ends = list(range(_HEAT_COLORS)), ["good", "bad"]
    if not block.small_is_good:
        steps, ends = steps[::-1], ends[::-1]
    unit = f" {escape(block.unit)}" if block.unit else ""
    swatches = "".join(f'<i class="h{step}"></i>' for step in steps)
    return f'<span class="key">{ends[0]}: ≤ {block.low:g}{unit}{swatches}≥ {block.high:g}{unit}: {ends[1]}</span>'


_DRAWS: dict[type, Callable[..., str]] = {HeatMap: _heat_map, Table: as_html, Text: _text}
