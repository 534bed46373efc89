"""The ``lowbit`` command, which looks for modules in the current folder last: none there replaces an installed one.

A configuration may name classes of the current folder. But a folder that somebody else made, such as a downloaded
model, may hold a ``matplotlib.py``, which must not run because a command imports matplotlib.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status. With ``LOWBIT_TRACEBACK=1`` errors keep their traceback."""
    if arguments is None:
        os.environ.setdefault("PYTHONSAFEPATH", "1")  # for processes that this one starts
        arguments = sys.argv[1:]
    with current_folder_last():
        from lightning_lowbit.cli.command import main

        return main(list(arguments))


@contextmanager
def current_folder_last() -> Iterator[None]:
    """Searches the current folder last, which ``python -m`` and ``PYTHONPATH`` put in front."""
    before = sys.path[:]
    with suppress(FileNotFoundError):  # the folder has been removed
        folder = os.getcwd()
        sys.path[:] = [*(path for path in before if os.path.realpath(path) != os.path.realpath(folder)), folder]
    try:
        yield
    finally:
        sys.path[:] = before
