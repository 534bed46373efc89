"""Writing files and directories of which there is never half.

    NAME.partial     while it is written, and while it is removed
    NAME.previous    what had the name before, for the moment in which one directory takes another's place
    NAME             whole

A file system renames at once: it is done, or not begun, whenever a process dies.
"""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

_PARTIAL, _PREVIOUS = ".partial", ".previous"


def replace_file(path: Path, text: str) -> None:
    """Writes a file such that there is never half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def partial_name(path: Path) -> Path:
    """Where to write what :func:`put_in_place` then gives its name."""
    return path.with_name(path.name + _PARTIAL)


def put_in_place(path: Path) -> None:
    """Gives a file, a directory or a link that was written as ``partial_name(path)`` its name, whatever has it now.

    It is on the disk before, so that there is none but whole ones after a failure of power, too.
    """
    partial, previous = partial_name(path), _previous_name(path)
    _sync(partial)
    if os.path.lexists(path) and (_is_directory(path) or _is_directory(partial)):
        os.rename(path, previous)  # a directory takes only an empty one's place
    os.replace(partial, path)
    _sync(path.parent, within=False)
    _remove(previous)


def discard(path: Path) -> None:
    """Removes a file or a directory, of which there is no half under its name meanwhile."""
    partial = partial_name(path)
    _remove(partial)
    with suppress(FileNotFoundError):
        os.rename(path, partial)
    _remove(partial)


def replace_link(path: Path, target: Path) -> None:
    """Makes a symbolic link, relative to where it lies."""
    partial = partial_name(path)
    _remove(partial)
    partial.symlink_to(os.path.relpath(target, path.parent))
    put_in_place(path)


def put_back(path: Path) -> None:
    """Gives what had the name before it back, if a process died in :func:`put_in_place`; several may do so at once."""
    if not os.path.lexists(path):
        with suppress(FileNotFoundError):
            os.rename(_previous_name(path), path)


def mend(path: Path) -> None:
    """Puts back, and removes what a process that died has left; none may be writing there."""
    put_back(path)
    for left in (partial_name(path), _previous_name(path)):
        _remove(left)


def unfinished(folder: Path, suffix: str) -> set[Path]:
    """The names in a folder and below, with this suffix, that were being written or removed when a process died."""
    found = set()
    for place, folders, files in os.walk(folder):
        lefts = [Path(place, name) for name in (*folders, *files) if name.endswith((_PARTIAL, _PREVIOUS))]
        found |= {left.with_suffix("") for left in lefts if left.stem.endswith(suffix)}
        folders[:] = [name for name in folders if suffix not in name]  # not into checkpoints
    return found


def _previous_name(path: Path) -> Path:
    return path.with_name(path.name + _PREVIOUS)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    if _is_directory(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path, within: bool = True) -> None:
    """Waits until it is on the disk; of a directory, all that is in it, too."""
    if path.is_symlink() or os.name == "nt":  # Windows does so for what is open for writing alone
        return
    if within and path.is_dir():
        for entry in path.iterdir():
            _sync(entry)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some mounted file systems do so for files alone
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
