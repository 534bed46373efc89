"""Writes tables as text for a terminal, as HTML or as markdown."""

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from html import escape
from itertools import zip_longest

from lightning_lowbit._lightning import Tqdm, TQDMProgressBar, Trainer
from lightning_lowbit.report.blocks import Link, Table, Text
from lightning_lowbit.report.formatting import cell

_NUMBER = re.compile(r"([-+]?\d[\d.,]*(e[-+]?\d+)?( ?[^\s\d]{1,8})?|not finite|)")  # with a unit, or nothing
_SENTENCE = 40  # characters of a cell; where one is longer, a page folds its column
_NARROWEST = 12  # characters; a column is not folded below this width
_NOTEBOOK = 88  # columns that notebooks show without cutting them


def _rows(table: Table) -> list[list[str]]:
    return [[cell(value) for value in row] for row in table.rows]


def as_markdown(table: Table) -> str:
    rows = [[text.replace("|", r"\|") for text in row] for row in _rows(table)]
    lines = [[*map(str, table.header)], ["---", *["---:"] * (len(table.header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_html(table: Table) -> str:
    rows = _rows(table)
    columns = [*zip_longest(*rows, fillvalue="")] if table.header else []
    kinds = dict.fromkeys(range(len(columns)), "")
    kinds |= {i: ' class="text"' for i, column in enumerate(columns) if i and max(map(len, column)) > _SENTENCE}
    kinds |= {i: ' class="number"' for i, column in enumerate(columns) if all(map(_NUMBER.fullmatch, column))}

    def line(cells: Sequence[object], first: str, tag: str) -> str:
        tags = [first, *[tag] * (len(cells) - 1)]
        classes = [kinds.get(i, "") for i in range(len(cells))]
        parts = zip(tags, classes, map(_as_html, cells), strict=False)
        return f"<tr>{''.join(f'<{tag}{kind}>{html}</{tag}>' for tag, kind, html in parts)}</tr>"

    head = f"<thead>{line([*map(str, table.header)], 'th', 'th')}</thead>" if table.header else ""
    body = "".join(line(row, "td" if table.header else "th", "td") for row in table.rows)
    kind = "" if table.header else ' class="pairs"'
    return framed(f"<table{kind}>{head}<tbody>{body}</tbody></table>", escape(table.caption))


def _as_html(value: object) -> str:
    text = escape(cell(value))
    return f'<a href="{escape(value.address)}">{text}</a>' if isinstance(value, Link) else text


def framed(table: str, caption: str, kind: str = "table") -> str:
    """HTML of a table in a box that scrolls; the caption is outside, because a <caption> is as narrow as the table."""
    scrolled = f'<div class="scroll">{table}</div>'
    if not caption:
        return scrolled
    return f'<figure class="{kind}"><figcaption>{caption}</figcaption>{scrolled}</figure>'


def plain(*blocks: Table | Text, width: int | None = None) -> str:
    """Blocks as lines of text with aligned columns, folded to ``width`` characters."""
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Text):
            lines += [*_wrapped(block.text, width), ""]
            continue
        rows = [[*map(str, block.header)], *_rows(block)]
        widths = _fitted([max(map(len, column)) for column in zip(*rows, strict=True)], width)
        header, *body = (_folded_row(row, widths) for row in rows)
        lines += [*header, "  ".join("-" * width for width in widths), *(line for row in body for line in row)]
        lines += [*_wrapped(block.caption, width), ""]
    return "\n".join(lines)


def show(trainer: Trainer, *blocks: Table | Text) -> None:
    """Prints blocks above the progress bar, if any, folded to the width of the terminal or notebook, not in a file."""
    width = _NOTEBOOK if "ipykernel" in sys.modules else None
    text = plain(*blocks, width=shutil.get_terminal_size().columns if sys.stdout.isatty() else width)
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        Tqdm.write(text)  # bar.print is silent while no bar is drawn, as before training
    elif bar is not None:
        bar.print(text)
    else:
        print(text)


def _wrapped(text: str, width: int | None) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) if width is not None else [*filter(None, [text])]


def _fitted(widths: list[int], width: int | None) -> list[int]:
    widths = widths.copy()
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[0 if widths[0] > _NARROWEST else widths.index(max(widths))] -= 1
    return widths


def _folded_row(row: list[str], widths: list[int]) -> list[str]:
    cells = [_folded(text, width, "" if i else "  ") for i, (text, width) in enumerate(zip(row, widths, strict=True))]
    padded = (zip(line, widths, strict=True) for line in zip_longest(*cells, fillvalue=""))
    return ["  ".join(part.ljust(width) for part, width in line).rstrip() for line in padded]


def _folded(text: str, width: int, indent: str) -> list[str]:
    if len(text) <= width:
        return [text]
    lines = [""]
    for part in re.findall(rf"[^. /:,]{{1,{width - len(indent) - 1}}}[. /:,]?|.", text):
        if lines[-1].strip() and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append(indent)
        lines[-1] += part
    return lines
