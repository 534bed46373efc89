"""Finds complete checkpoints, and the newest of them.

torch writes a CRC-32 with every tensor, but does not verify it: damaged tensors load silently. Here it is verified
once, when a run is resumed. The newest checkpoint has the highest recorded step: copying changes file times.
"""

import io
import os
import pickletools
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import IO, Any, TypeVar

from lightning_lowbit._lightning import rank_zero_only
from lightning_lowbit.atomic_files import name_of, named
from lightning_lowbit.precision.checkpoints.files import INDEX, META

_T = TypeVar("_T")

FOREIGN = "is not a file that torch.save wrote"
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0a"  # first bytes of torch.save's files, since and before 1.6
_HEADER, _LENGTHS = 30, (26, 28)  # bytes before an entry of a zip file, and where the lengths of name and padding are
_THREADS, _CHUNK = 4, 2**20  # threads help: checksums release the GIL
_HEAD = 2**16  # bytes that contain the step: Lightning writes it before large entries


class DamagedCheckpointError(ValueError):
    """The newest checkpoint is damaged; ``damaged`` has the damage of each, the newest first.

    ``instead`` is the newest complete checkpoint or None, and ``option`` the option that takes it.
    """

    def __init__(self, damaged: dict[Path, str], instead: Path | None, option: str) -> None:
        path, wrong = next(iter(damaged.items()))
        remedy = (
            "No other checkpoint there is whole: begin afresh, without ckpt_path."
            if instead is None
            else f"The newest whole checkpoint is {instead} (step {step_of(instead)}): take it with {option}."
        )
        super().__init__(f"The checkpoint {path} is damaged: it {wrong}. {remedy}")


def first_whole(paths: Iterable[Path]) -> tuple[Path | None, dict[Path, str]]:
    damaged: dict[Path, str] = {}
    for path in paths:
        for place in (path, path.with_name(name_of(path))):  # another process may have renamed it back
            wrong = damage(place)
            if wrong is None:
                return place, damaged
            if os.path.lexists(place):  # otherwise it has been removed
                damaged[place] = wrong
                break
    return None, damaged


def find(*folders: Path, suffix: str, depth: int | None = None) -> list[Path]:
    for _ in range(3):  # another process may rename or remove some meanwhile
        paths = {path for folder in folders for path in named(folder, suffix, depth)}
        ordered = newest_first(paths)
        if len(ordered) == len(paths):
            break
    return ordered


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sorts checkpoints by run (``version_3``), step (unknown: last) and time; drops missing ones."""
    versions = {path: re.findall(r"version_(\d+)", str(path.parent)) for path in paths}
    newest = max((int(numbers[-1]) for numbers in versions.values() if numbers), default=0)
    keys = {}
    for path, version in versions.items():
        try:
            run = int(version[-1]) if version else newest
            keys[path] = (run, step_of(path), path.lstat().st_mtime, str(path))  # the same order on all ranks
        except FileNotFoundError:
            continue
    return sorted(keys, key=lambda path: keys[path], reverse=True)


def step_of(path: Path) -> float:
    """Returns the optimizer steps of a checkpoint, from its first bytes or else its name; infinity if unknown."""
    try:
        with (path / META if path.is_dir() else path).open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        head = b""
    if head[:4] == _ZIP:  # a header, a name, padding, and the pickle
        head = head[_HEADER + sum(int.from_bytes(head[at : at + 2], "little") for at in _LENGTHS) :]
    step = _integer(head, "global_step")
    if step is None:
        in_name = re.search(r"step=(\d+)", name_of(path))
        step = int(in_name[1]) if in_name else None
    return float("inf") if step is None else step


def _integer(pickled: bytes, key: str) -> int | None:
    """Returns the first integer under a key in a pickle or its beginning, which is parsed and not executed."""
    stream, after = io.BytesIO(pickled), False
    try:
        while True:  # ends with an error at the end of the bytes
            for operation, argument, _ in pickletools.genops(stream):
                if after and isinstance(argument, int) and operation.name.startswith(("BININT", "LONG1")):
                    return argument
                after = argument == key or (after and operation.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"))
    except Exception:  # any bytes may raise any error
        return None


def damage(path: Path) -> str | None:
    """Says how a checkpoint is damaged (``"is cut off"``), or returns None; does not check unknown formats of folders.

    Only the first rank reads the tensors in a directory: strategies broadcast its path.
    """
    if not path.exists():
        return f"is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "does not exist"
    if path.is_dir():
        return _damage_of_directory(path)
    with path.open("rb") as file:
        return _damage_of_file(file)


def _damage_of_directory(path: Path) -> str | None:
    names = {entry.name for entry in path.iterdir()}
    missing = {META, INDEX} - names
    if names and len(missing) == 2 and not any(name.endswith(".distcp") for name in names):
        return None
    if missing:
        return f"lacks {' and '.join(sorted(missing))}"
    with (path / META).open("rb") as file:
        wrong = _damage_of_file(file)
    return f"has a {META} that {wrong}" if wrong else _damage_of_shards(path)


def _damage_of_shards(path: Path) -> str | None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # slow to import

    try:
        places: list[Any] = list(FileSystemReader(path).read_metadata().storage_data.values())
        ends = {place.relative_path: 0 for place in places}
        for place in places:
            ends[place.relative_path] = max(ends[place.relative_path], place.offset + place.length)
    except Exception:  # a damaged pickle may raise any error
        return f"has a {INDEX} that cannot be read"
    for name, end in ends.items():
        if not (path / name).exists():
            return f"lacks {name}"
        if (path / name).stat().st_size < end:
            return f"is cut off in {name}"
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return None

    def wrong(place: Any) -> bool:
        with (path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return _damage_of_file(io.BytesIO(file.read(place.length)), threads=1) is not None

    place = _first(wrong, places, _THREADS)
    return None if place is None else f"does not match its checksums in {place.relative_path}"


def _damage_of_file(file: IO[bytes], threads: int = _THREADS) -> str | None:
    head = file.read(4)
    if not head:
        return "is empty"
    if head != _ZIP:
        return None if head == _LEGACY else FOREIGN
    try:
        archive = zipfile.ZipFile(file)
    except Exception:  # damaged headers may raise any error; also below
        return "is cut off"
    entries = archive.infolist()
    if not any(entry.CRC for entry in entries):  # torch.serialization.set_crc32_options(False)
        return None

    entry = _first(partial(_is_wrong, archive, file, Lock()), entries, threads)
    return None if entry is None else f"does not match its checksum in {entry.filename}"


def _is_wrong(archive: zipfile.ZipFile, file: IO[bytes], lock: Lock, entry: zipfile.ZipInfo) -> bool:
    """Returns whether an entry of an archive in a file lacks its checksum. Entries of torch, which are not compressed,
    are read by several threads. ``ZipFile.open`` serves one alone: from Python 3.12 on it moves the file relative to
    where another thread has left it."""

    def read(at: int, size: int) -> bytes:
        with lock:
            file.seek(at)
            return file.read(size)

    try:
        if entry.compress_type != zipfile.ZIP_STORED:  # by other programs; torch reads it
            with lock, archive.open(entry) as content:
                while content.read(_CHUNK):  # compares the checksum at the end
                    pass
            return False
        header, checksum = read(entry.header_offset, _HEADER), 0
        start = entry.header_offset + _HEADER + sum(int.from_bytes(header[at : at + 2], "little") for at in _LENGTHS)
        for done in range(0, entry.file_size, _CHUNK):
            if not (part := read(start + done, min(_CHUNK, entry.file_size - done))):
                return True
            checksum = zlib.crc32(part, checksum)
    except Exception:
        return True
    return header[:4] != _ZIP or checksum != entry.CRC


def _first(is_wrong: Callable[[_T], bool], items: list[_T], threads: int) -> _T | None:
    with ThreadPoolExecutor(threads) as pool:
        return next((item for item, wrong in zip(items, pool.map(is_wrong, items), strict=True) if wrong), None)
