"""Tables and lines on the terminal."""

import re
import shutil
import sys
import textwrap
from itertools import zip_longest

from lightning_lowbit._lightning import Tqdm, TQDMProgressBar, Trainer
from lightning_lowbit.report.html import Table, Text

__all__ = ["Table", "Text", "plain", "show"]

_NOTEBOOK = 88  # columns that notebooks show without cutting them
_LEAST = 12  # columns that are left to a column of a table


def show(trainer: Trainer, *blocks: Table | Text) -> None:
    """Prints blocks above the progress bar, if there is one, as wide as the terminal or the notebook is."""
    text = plain(*blocks, width=_width())
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        Tqdm.write(text)  # bar.print says nothing where no bar is drawn: before training, at its end, with a rate of 0
    elif bar is not None:
        bar.print(text)
    else:
        print(text)


def _width() -> int | None:
    """How many columns there are; None in a file or a pipe, where nothing has to be folded."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return _NOTEBOOK if "ipykernel" in sys.modules else None


def plain(*blocks: Table | Text, width: int | None = None) -> str:
    """Blocks as lines of text, columns aligned; what is wider than ``width`` is folded."""
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Text):
            lines += [*_wrapped(block.text, width), ""]
            continue
        rows = [list(map(str, row)) for row in (block.header, *block.rows)]
        widths = _fitted([max(map(len, column)) for column in zip(*rows, strict=True)], width)
        header, *body = (_lines(row, widths) for row in rows)
        lines += [*header, "  ".join("-" * width for width in widths), *(line for row in body for line in row)]
        lines += [*_wrapped(block.caption, width), ""]
    return "\n".join(lines)


def _wrapped(text: str, width: int | None) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) if width is not None else [*filter(None, [text])]


def _fitted(widths: list[int], width: int | None) -> list[int]:
    """Widths of columns that fit: the first column, of names, gives what it has to spare, then always the widest."""
    widths = widths.copy()
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _LEAST:
        widths[0 if widths[0] > _LEAST else widths.index(max(widths))] -= 1
    return widths


def _lines(row: list[str], widths: list[int]) -> list[str]:
    """The lines of a row, whose cells are folded to their widths."""
    cells = [_folded(cell, width, "" if i else "  ") for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
    padded = (zip(line, widths, strict=True) for line in zip_longest(*cells, fillvalue=""))
    return ["  ".join(part.ljust(width) for part, width in line).rstrip() for line in padded]


def _folded(cell: str, width: int, indent: str) -> list[str]:
    """A cell in lines, which end with a dot, a blank or the like, wherever there is one."""
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for part in re.findall(rf"[^. /:,]{{1,{width - len(indent) - 1}}}[. /:,]?|.", cell):
        if lines[-1].strip() and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append(indent)
        lines[-1] += part
    return lines
