"""Tables and lines on the terminal."""

import shutil
import sys

from lightning_lowbit._lightning import Tqdm, TQDMProgressBar, Trainer
from lightning_lowbit.report.blocks import Table, Text
from lightning_lowbit.report.tables import plain

__all__ = ["Table", "Text", "plain", "show"]

_NOTEBOOK = 88  # columns that notebooks show without cutting them


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
