"""Atomic writing of files and directories: a file with the final name is always complete.

    NAME.HOST-PID.partial     being written or removed
    NAME.HOST-PID.previous    the old version, while one directory replaces another

A writer holds a lock on the folder, which a dying process loses. So leftovers differ from files being written.
"""

import errno
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PARTIAL, _PREVIOUS = ".partial", ".previous"
_HOST = platform.node().replace(".", "_")
# Earlier versions wrote names without a host, for checkpoints only.
_LEFT = re.compile(rf"(?P<name>.+?)((?<=\.ckpt)|\.(?P<host>[^.]+)-(?P<process>\d+))(?P<kind>{_PARTIAL}|{_PREVIOUS})")
_STALE = 3600  # seconds without a change, after which another machine is assumed dead


def replace_file(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a full disk tells no path
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def being_written(path: Path) -> Iterator[Path]:
    """Yields a path to write to, for :func:`put_in_place`, and removes it if it is not put there; first removes
    leftovers in the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mend(path.parent, path.suffix, depth=0)
    with _partial(path) as partial:
        try:
            yield partial
        finally:
            remove(partial)


def put_in_place(partial: Path, path: Path) -> None:
    """Renames a file, directory or link atomically and durably (its data are flushed), and replaces an older one."""
    previous = _scratch(path, _PREVIOUS)
    _sync(partial)
    if os.path.lexists(path) and (_is_directory(path) or _is_directory(partial)):
        remove(previous)
        os.rename(path, previous)  # a directory can replace only an empty one
    try:
        os.replace(partial, path)
    finally:
        _put_back(previous, path)
    _sync(path.parent, within=False)
    remove(previous)


def discard(path: Path, how: Callable[[Path], object] | None = None) -> None:
    """Removes a file or directory atomically; ``how`` replaces the removal of anything that is not a link."""
    with _partial(path) as partial:
        with suppress(FileNotFoundError):
            os.rename(path, partial)
            if how is not None and not partial.is_symlink():
                how(partial)
        remove(partial)


def replace_link(path: Path, target: Path) -> None:
    with _partial(path) as partial:
        partial.symlink_to(os.path.relpath(target, path.parent))
        put_in_place(partial, path)


def remove(path: Path) -> None:
    if _is_directory(path):
        shutil.rmtree(path, ignore_errors=True)  # another process may be removing it
    else:
        path.unlink(missing_ok=True)


def mend(folder: Path, suffix: str, depth: int | None = None) -> None:
    """Restores or removes the files with a suffix that dead processes left in a folder, and in those up to ``depth``
    levels below it (all by default).

    Files that may still be written are left alone: all in a folder that a process has locked, however old they look to
    this machine's clock. Where locks do not help (another machine, a file system without locks), these are the files
    that changed within an hour, or have the number of a process that lives.
    """
    for left, parts in _leftovers(_entries(folder, suffix, depth), suffix).items():
        with suppress(OSError), _lock(left.parent, alone=True) as alone:
            if alone is not False and _is_dead(left, parts, has_locks=alone is True):
                if parts["kind"] == _PREVIOUS:
                    _put_back(left, left.with_name(parts["name"]))
                remove(left)


def named(folder: Path, suffix: str, depth: int | None = None) -> set[Path]:
    """Returns the complete files and directories with a suffix in a folder, and the old versions of others."""
    entries = [*_entries(folder, suffix, depth)]
    complete = {path for path in entries if path.suffix == suffix}
    leftovers = _leftovers(entries, suffix).items()
    previous = {left: left.with_name(parts["name"]) for left, parts in leftovers if parts["kind"] == _PREVIOUS}
    return complete | {left for left, path in previous.items() if path not in complete}


def name_of(path: Path) -> str:
    match = _LEFT.fullmatch(path.name)
    return match["name"] if match else path.name


def _leftovers(entries: Iterable[Path], suffix: str) -> dict[Path, re.Match[str]]:
    """Returns what processes left, and the parts of its name."""
    matches = {path: _LEFT.fullmatch(path.name) for path in entries}
    return {path: match for path, match in matches.items() if match and match["name"].endswith(suffix)}


def _entries(folder: Path, suffix: str, depth: int | None) -> Iterator[Path]:
    """Yields files and directories with a suffix, and what may be left of them."""
    endings = (suffix, _PARTIAL, _PREVIOUS)
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *files) if name.endswith(endings))
        is_deep = depth is not None and len(Path(place).relative_to(folder).parts) >= depth
        folders[:] = [] if is_deep else [name for name in folders if not name.endswith(endings)]


def _is_dead(left: Path, parts: re.Match[str], has_locks: bool) -> bool:
    """Returns whether the writer of a file or directory has ended, if nobody has locked its folder."""
    is_here = parts["host"] == _HOST
    if is_here and has_locks:
        return True
    return _age(left) > _STALE and not (is_here and _lives(int(parts["process"])))


def _lives(process: int) -> bool:
    if os.name == "nt":  # where this signal ends a process
        return False
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # but of another user
    return True


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Locks the folder of a path, and yields a free one beside it."""
    with _lock(path.parent):
        partial = _scratch(path, _PARTIAL)
        remove(partial)
        yield partial


def _scratch(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{_HOST}-{os.getpid()}{kind}")


def _put_back(previous: Path, path: Path) -> None:
    if not os.path.lexists(path):
        with suppress(FileNotFoundError):
            os.rename(previous, path)


def _age(path: Path) -> float:
    parts = [path, *(Path(place, name) for place, _, files in os.walk(path) for name in files)]
    return time.time() - max(part.lstat().st_ctime for part in parts)


@contextmanager
def _lock(folder: Path, alone: bool = False) -> Iterator[bool | None]:
    """Locks a folder together with others or ``alone``; yields whether it did, or None where there are no locks."""
    if fcntl is None:
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    has: bool | None = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except BlockingIOError:  # another process holds the lock
        has = False
    except OSError:
        has = None
    try:
        yield has
    finally:
        if has:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # child processes inherited the descriptor
        os.close(descriptor)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _sync(path: Path, within: bool = True) -> None:
    """Flushes a file, or a folder's list of names and all files ``within`` it. No link is followed."""
    if (within and path.is_symlink()) or os.name == "nt":  # Windows flushes only files that are open for writing
        return
    if within and path.is_dir():
        for entry in path.iterdir():
            _sync(entry)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some mounted file systems cannot flush directories
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
