"""A page about a run as one HTML file: titled sections of text, tables, charts and heat maps, and nothing to fetch.

    page = render("my run", [Section("Loss", [Chart("loss", {"training": ([1, 2, 3], [2.5, 2.2, 2.1])})])])

Everything that comes from outside is escaped, and what fails in one section is shown there and leaves the others alone.
"""

import math
import re
import traceback
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby, zip_longest
from typing import Any

from lightning_lowbit.report.blocks import Block, Chart, HeatMap, Section, Table, Text, common_parent, number
from lightning_lowbit.report.charts import draw
from lightning_lowbit.report.style import HEAT_STEPS, STYLE

__all__ = ["Block", "Chart", "HeatMap", "Section", "Table", "Text", "number", "render"]


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
        status: a word beside the title; ``"finished"``, ``"interrupted"`` and ``"failed"`` have colors.
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
<style>{STYLE}</style>
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


# --- blocks -----------------------------------------------------------------------------------------------------------


_NUMBER = re.compile(r"([-+]?\d[\d.,]*(e[-+]?\d+)?( ?[^\s\d]{1,8})?|not finite|)")  # with a unit, or nothing


def _section(section: Section, prefix: str) -> str:
    title = str(getattr(section, "title", type(section).__name__))
    try:
        body = _blocks(section.blocks, prefix)
    except Exception:
        body = _text(Text("This section could not be shown.")) + _text(Text(traceback.format_exc(), preformatted=True))
    mark = ' class="alarming"' if getattr(section, "is_alarming", False) else ""
    return f"<section{mark}>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def _blocks(blocks: Sequence[Block], prefix: str) -> str:
    parts = []
    for is_chart, group in groupby(enumerate(blocks), key=lambda pair: isinstance(pair[1], Chart)):
        members = list(group)
        if not is_chart:
            parts += [_block(block) for _, block in members]
        else:
            kind = "single" if len(members) == 1 else "multiples"
            figures = "\n".join(draw(chart, f"{prefix}-{i}", kind) for i, chart in members)  # type: ignore[arg-type]
            parts.append(f'<div class="{kind}">\n{figures}\n</div>')
    return "\n".join(parts)


def _block(block: Block) -> str:
    if isinstance(block, HeatMap):
        return _heat_map(block)
    return _table(block) if isinstance(block, Table) else _text(block)  # type: ignore[arg-type]


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
    head = f"<thead>{row([str(name) for name in table.header], 'th', 'th')}</thead>" if table.header else ""
    body = "".join(row(cells, "td" if table.header else "th", "td") for cells in rows)
    kind = "" if table.header else ' class="pairs"'
    scrolled = f'<div class="scroll"><table{kind}>{head}<tbody>{body}</tbody></table></div>'
    if not table.caption:
        return scrolled
    # No <caption>, which would be as narrow as the table.
    return f'<figure class="table"><figcaption>{escape(table.caption)}</figcaption>{scrolled}</figure>'


# --- heat maps --------------------------------------------------------------------------------------------------------

_WORDS = {"nan": "not a number", "inf": "infinite", "-inf": "minus infinite"}


def _heat_map(block: HeatMap) -> str:
    if not -math.inf < block.low < block.high < math.inf:
        raise ValueError(f"A scale of colors begins below its end; got low={block.low!r}, high={block.high!r}.")
    decimals = max(0, 2 - math.floor(math.log10(block.high - block.low)))  # some hundred steps on the scale

    def show(value: float) -> str:
        text = f"{round(value, decimals) + 0.0:.{decimals}f}"  # no -0.0
        return text if len(text) <= 8 else number(value)

    def cell(value: float | None) -> str:
        if value is None:
            return "<td></td>"
        if not math.isfinite(value):
            return f'<td class="words">{_WORDS[str(float(value))]}</td>'
        share = min(max((value - block.low) / (block.high - block.low), 0.0), 1.0)
        step = min(int((share if block.small_is_good else 1 - share) * HEAT_STEPS), HEAT_STEPS - 1)
        return f'<td class="h{step}">{show(value)}</td>'

    common = common_parent(block.rows)
    columns = "".join(f"<th>{escape(name)}</th>" for name in block.columns)
    lines = [f"<tr><th>{escape(common)}{'.…' if common else ''}</th>{columns}</tr>"]
    for name, values in zip(block.rows, block.values, strict=True):
        cells = "".join(cell(value) for _, value in zip(block.columns, values, strict=True))
        lines.append(f'<tr><th title="{escape(name)}">{escape(name.removeprefix(f"{common}."))}</th>{cells}</tr>')
    table = f'<div class="scroll"><table><thead>{lines[0]}</thead><tbody>{"".join(lines[1:])}</tbody></table></div>'
    caption = f"<figcaption>{escape(block.caption)} {_scale(block)}</figcaption>"
    return f'<figure class="table heat">{caption}{table}</figure>'


def _scale(block: HeatMap) -> str:
    """The scale of colors, from low to high."""
    steps, ends = list(range(HEAT_STEPS)), ["good", "bad"]
    if not block.small_is_good:
        steps, ends = steps[::-1], ends[::-1]
    unit = f" {escape(block.unit)}" if block.unit else ""
    swatches = "".join(f'<i class="h{step}"></i>' for step in steps)
    return f'<span class="key">{ends[0]}: ≤ {block.low:g}{unit}{swatches}≥ {block.high:g}{unit}: {ends[1]}</span>'
