"""A folder from which code may be loaded, and one process at a time that writes code there.

A shared library runs with all that its user may do. So it is loaded from a folder that this user or the administrator
owns, and to which nobody else can write: nobody can exchange a file between its check and its use.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_lowbit.compilation import inform

try:
    import fcntl
except ImportError:  # Windows, where a user's folders are closed to others and no locks are taken
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def trusted(folder: Path) -> Iterator[Path]:
    """Yields a path to a folder, made if it is missing, in which only this user and the administrator change files.

    The folder is opened and then checked. On Linux the path leads through the open descriptor: it stays the folder that
    was checked, whatever happens to links and folders above it. Elsewhere the folders above are trusted.

    Raises:
        OSError: the folder cannot be made or opened, belongs to another user, or can be written by others.
    """
    folder = folder.absolute()
    if fcntl is None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    _make(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check(folder, descriptor)
        opened = Path(f"/proc/self/fd/{descriptor}")
        yield opened if opened.exists() else folder
    except OSError as error:
        if isinstance(error.filename, str | Path):  # the descriptor says nothing to users
            error.filename = shown(Path(error.filename))
        raise
    finally:
        os.close(descriptor)


def read_trusted(path: Path) -> bytes:
    """Reads a file in a trusted folder; a link, or a file that others own or can write, is an ``OSError``."""
    try:
        return _read_once(path)
    except FileNotFoundError:  # or another process has replaced it between the two steps
        return _read_once(path)


def _read_once(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        _check(path, descriptor)
        return file.read()


def shown(path: Path) -> str:
    """Returns a path in a trusted folder as users know it."""
    return os.path.join(os.path.realpath(path.parent), path.name)


@contextlib.contextmanager
def one_builder(lock: Path, silent: float = 5.0, longest: float = 180.0) -> Iterator[tuple[int, ...]]:
    """Waits until no other process holds a lock file; yields descriptors that a compiler should inherit.

    The system frees the lock when the last process ends that has the descriptor: if this one is killed, when its
    compiler has ended, too. So whoever holds the lock can remove what others have begun. On a file system without locks
    nobody waits.

    Args:
        lock: the file, in a trusted folder.
        silent: seconds of waiting, after which this process says for whom it waits.
        longest: seconds of waiting, after which the other process counts as stopped; the default is several times what
            the compiler needs on a busy machine.

    Raises:
        TimeoutError: another process holds the lock for too long; it may be stopped.
        OSError: the lock file cannot be written.
    """
    if fcntl is None:
        yield ()
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        _check(lock, descriptor)
        _wait(descriptor, lock, silent, longest)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield (descriptor,)
    finally:
        os.close(descriptor)


def _make(folder: Path) -> None:
    if folder.exists():
        return
    above = next(parent for parent in folder.parents if parent.exists())
    if os.geteuid() == 0 and above.stat().st_uid != 0:
        raise PermissionError(f"{above} belongs to another user, who could not use what root makes there")
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)


def _check(path: Path, descriptor: int) -> None:
    """Refuses a path that another user owns or can write, and a file with a second name; closes this user's folder."""
    if fcntl is None:
        return
    status = os.fstat(descriptor)
    name, others = shown(path), stat.S_IWGRP | stat.S_IWOTH
    is_file, is_folder = stat.S_ISREG(status.st_mode), stat.S_ISDIR(status.st_mode)
    if is_file and status.st_nlink == 0:
        raise FileNotFoundError(f"{name} was removed")
    if is_folder and status.st_uid == os.geteuid() and _can_be_closed(descriptor, status.st_mode):
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~others)
            status = os.fstat(descriptor)
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{name} belongs to another user")
    if status.st_mode & others:
        raise PermissionError(f"other users can write to {name}; `chmod go-w {name}` forbids it")
    if not (is_folder or (is_file and status.st_nlink == 1)):
        raise PermissionError(f"{name} is no file of its own")


def _can_be_closed(descriptor: int, mode: int) -> bool:
    """Returns whether a folder is open to its group alone, as umask 002 makes it, and holds only libraries.

    So no folder that serves others too, such as /tmp or /usr/local of root, gets other permissions. Files
    that the group may have left there are refused one by one.
    """
    is_for_group = bool(mode & stat.S_IWGRP) and not mode & (stat.S_IWOTH | stat.S_ISVTX | stat.S_ISGID)
    return is_for_group and all(name.startswith("kernels-") for name in os.listdir(descriptor))


def _wait(descriptor: int, lock: Path, silent: float, longest: float) -> None:
    start, has_informed = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - start
        except OSError:  # a file system without locks
            return
        holder = f"process {_holder(descriptor)} holds {shown(lock)}"
        if waited > longest:
            raise TimeoutError(f"{holder} since more than {longest:.0f} s")
        if waited > silent and not has_informed:
            has_informed = True
            inform(
                f"lightning_lowbit waits for its C++ kernels: {holder} while it compiles them. If that process is "
                f"stopped, continue or end it; after {longest:.0f} s this process goes on without it."
            )
        time.sleep(0.05)


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
