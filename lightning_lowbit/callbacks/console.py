"""Tables and lines on the terminal: plain text, or ``rich`` where it is installed."""

import io
import shutil
import sys

from lightning_lowbit._lightning import Tqdm, TQDMProgressBar, Trainer
from lightning_lowbit.callbacks.report_page import Table, Text

__all__ = ["Table", "Text", "plain", "show"]


def show(trainer: Trainer, *blocks: Table | Text) -> None:
    """Prints blocks above the progress bar, if there is one."""
    try:
        text = _rich(*blocks)
    except ImportError:
        text = plain(*blocks)
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        Tqdm.write(text)  # bar.print says nothing where no bar is drawn: before training, at its end, with a rate of 0
    elif bar is not None:
        bar.print(text)
    else:
        print(text)


def plain(*blocks: Table | Text) -> str:
    """Blocks as lines of text, columns aligned."""
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Text):
            lines += [block.text, ""]
            continue
        rows = [list(map(str, row)) for row in (block.header, *block.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [shown[0], "  ".join("-" * width for width in widths), *shown[1:], *filter(None, [block.caption]), ""]
    return "\n".join(lines)


def _rich(*blocks: Table | Text) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    terminal = sys.stdout.isatty()
    # Beyond a terminal there is no width to keep: names are not cut.
    width = shutil.get_terminal_size().columns if terminal else 240
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    for block in blocks:
        if isinstance(block, Text):
            console.print(RichText(block.text))
            continue
        caption = RichText(block.caption) if block.caption else None
        table = RichTable(box=box.SIMPLE, caption=caption, caption_justify="left")
        for name in block.header:
            table.add_column(RichText(name), overflow="fold")
        for row in block.rows:
            table.add_row(*(RichText(str(cell)) for cell in row))
        console.print(table)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()
