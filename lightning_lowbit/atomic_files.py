"""Writing files and directories of which there is never half.

    NAME.HOST-PID.partial     while it is written, and while it is removed
    NAME.HOST-PID.previous    what had the name before, for the moment in which one directory takes another's place
    NAME                      whole

A file system renames at once: it is done, or not begun, whenever a process dies. Who writes holds a lock on the folder,
which ends with the process: so what a dead one has left is told from what a living one is writing.
"""

import errno
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PARTIAL, _PREVIOUS = ".partial", ".previous"
_HOST = platform.node().replace(".", "_")
# Versions before this one wrote no host: of such names only checkpoints are ours.
_LEFT = re.compile(rf"(?P<name>.+?)((?<=\.ckpt)|\.(?P<host>[^.]+)-\d+)(?P<kind>{_PARTIAL}|{_PREVIOUS})")
_STALE = 3600  # seconds without a change, after which nothing on another machine writes it any more


def replace_file(path: Path, text: str) -> None:
    """Writes a file such that there is never half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def being_written(path: Path) -> Iterator[Path]:
    """Where to write what :func:`put_in_place` then gives its name; what others left in the folder is removed before.

    What is written and got no name has to be removed with :func:`remove`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mend(path.parent, path.suffix, below=False)
    with _lock(path.parent):
        partial = _own(path, _PARTIAL)
        remove(partial)
        yield partial


def put_in_place(partial: Path, path: Path) -> None:
    """Gives a file, a directory or a link that was written elsewhere in the folder its name, whatever has it now.

    It is on the disk before, so that there is none but whole ones after a failure of power, too.
    """
    previous = _own(path, _PREVIOUS)
    _sync(partial)
    if os.path.lexists(path) and (_is_directory(path) or _is_directory(partial)):
        remove(previous)
        os.rename(path, previous)  # a directory takes only an empty one's place
    try:
        os.replace(partial, path)
    finally:
        _put_back(previous, path)
    _sync(path.parent, within=False)
    remove(previous)


def discard(path: Path, how: Callable[[Path], object] | None = None) -> None:
    """Removes a file or a directory, of which there is no half under its name meanwhile.

    Args:
        path: of it.
        how: removes what is given to it; by default as the operating system does. A link is only unlinked.
    """
    with _lock(path.parent):
        partial = _own(path, _PARTIAL)
        remove(partial)
        with suppress(FileNotFoundError):
            os.rename(path, partial)
            if how is not None and not partial.is_symlink():
                how(partial)
        remove(partial)


def replace_link(path: Path, target: Path) -> None:
    """Makes a symbolic link, relative to where it lies."""
    with _lock(path.parent):
        partial = _own(path, _PARTIAL)
        remove(partial)
        partial.symlink_to(os.path.relpath(target, path.parent))
        put_in_place(partial, path)


def remove(path: Path) -> None:
    """Removes a file, a link or a directory, if there is one."""
    if _is_directory(path):
        shutil.rmtree(path, ignore_errors=True)  # another process may be removing it
    else:
        path.unlink(missing_ok=True)


def mend(folder: Path, suffix: str, below: bool = True) -> None:
    """Puts back and removes what processes have left that died while they wrote or removed names with this suffix.

    What a living process may be writing stays: all of it in a folder that one of this machine is writing to; what
    changed within an hour, if it is from another machine or the file system has no locks.

    Args:
        folder: where to look.
        suffix: of the names.
        below: also in the folders below.
    """
    for left in _leftovers(folder, suffix, below):
        with suppress(OSError), _lock(left.parent, alone=True) as alone:
            found = _parts(left)
            if (alone and found["host"] == _HOST) or _age(left) > _STALE:
                if found["kind"] == _PREVIOUS:
                    _put_back(left, left.with_name(name_of(left)))
                remove(left)


def named(folder: Path, suffix: str, below: bool = True) -> set[Path]:
    """The whole ones with this suffix in a folder; changes nothing, and what vanishes meanwhile is no error.

    Where a process died in :func:`put_in_place` between two renames, it is what had the name before, where that lies.
    """
    found = {path for path in _entries(folder, suffix, below) if path.suffix == suffix}
    before = {left for left in _leftovers(folder, suffix, below) if _parts(left)["kind"] == _PREVIOUS}
    return found | {left for left in before if left.with_name(name_of(left)) not in found}


def name_of(path: Path) -> str:
    """The name of what :func:`named` found, also where a process that died has taken it away."""
    return _parts(path)["name"] if _LEFT.fullmatch(path.name) else path.name


def _leftovers(folder: Path, suffix: str, below: bool) -> list[Path]:
    found = [path for path in _entries(folder, suffix, below) if _LEFT.fullmatch(path.name)]
    return [path for path in found if name_of(path).endswith(suffix)]


def _entries(folder: Path, suffix: str, below: bool) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *files))
        checkpoints = (suffix, _PARTIAL, _PREVIOUS)
        folders[:] = [name for name in folders if below and not name.endswith(checkpoints)]


def _parts(left: Path) -> dict[str, str]:
    found = _LEFT.fullmatch(left.name)
    assert found is not None, left
    return found.groupdict()


def _own(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{_HOST}-{os.getpid()}{kind}")


def _put_back(previous: Path, path: Path) -> None:
    if not os.path.lexists(path):
        with suppress(FileNotFoundError):
            os.rename(previous, path)


def _age(path: Path) -> float:
    """Seconds since anything of it was written or renamed."""
    parts = [path, *(Path(place, name) for place, _, files in os.walk(path) for name in files)]
    return time.time() - max(part.lstat().st_ctime for part in parts)


@contextmanager
def _lock(folder: Path, alone: bool = False) -> Iterator[bool]:
    """Whether this process has a folder's lock: with others that write there, for which it waits, or alone, at once."""
    if fcntl is None:
        yield False
        return
    descriptor, has = os.open(folder, os.O_RDONLY), True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except OSError:  # another process has it, or there are none on this file system
        has = False
    try:
        yield has
    finally:
        if has:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # children that began meanwhile have inherited it
        os.close(descriptor)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


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
