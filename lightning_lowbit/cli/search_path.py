"""Makes the command look for modules in the current folder last, so that none there replaces an installed one.

A configuration may name classes of the current folder. But a folder that somebody else made, such as a downloaded
model, may hold a ``matplotlib.py``, which must not run because a command imports matplotlib.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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
