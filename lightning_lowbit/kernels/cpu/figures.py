"""Figures that were measured on this machine, in files beside the compiled library.

A file is data: only positive numbers under the expected names are taken from it. It appears whole or not at all, so
several processes may write it; the last one's stays. Where no folder keeps libraries, nothing is kept.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from math import inf

from lightning_lowbit.atomic_files import being_written, put_in_place, remove
from lightning_lowbit.kernels.cpu.cache import read_trusted, trusted
from lightning_lowbit.kernels.cpu.library import place

# Of a folder or file that is missing or cannot be trusted or written, and of a user without a home.
_NO_FILE = OSError, RuntimeError


def write_figures(name: str, figures: Mapping[str, float]) -> None:
    """Writes figures for all processes of this machine, if a folder keeps them.

    Args:
        name: what they depend on besides the library, for the name of the file.
        figures: positive numbers by their names.

    Examples:
        >>> write_figures("torch2.13.0-2", {"seconds": 0.002})
    """
    with contextlib.suppress(*_NO_FILE):
        parent, library = place()
        file = f"{library}-{name}.json"
        with trusted(parent) as folder, being_written(folder / file) as partial:
            try:
                partial.write_text(json.dumps({field: float(figure) for field, figure in figures.items()}))
                partial.chmod(0o644)
                put_in_place(partial, folder / file)
            finally:
                remove(partial)


def read_figures(name: str, fields: Sequence[str]) -> dict[str, float] | None:
    """Returns the figures that :func:`write_figures` has written; None for none, or other ``fields``."""
    content = b""
    with contextlib.suppress(*_NO_FILE):
        parent, library = place()
        with trusted(parent) as folder:
            content = read_trusted(folder / f"{library}-{name}.json")
    try:
        figures = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(figures, dict) or set(figures) != set(fields):
        return None
    is_valid = all(isinstance(figure, float) and 0 < figure < inf for figure in figures.values())
    return figures if is_valid else None
