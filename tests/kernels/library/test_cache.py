"""The folder that keeps the C++ kernels, and figures beside them: what is taken from it is whole, and nobody else's."""

import _ctypes
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest

from lightning_lowbit import atomic_files
from lightning_lowbit.kernels.cpu import cache as files
from lightning_lowbit.kernels.cpu import library
from lightning_lowbit.kernels.cpu.library import read_figures, write_figures
from tests.kernels.library.loads import calls, load, names
from tests.tables import each


def zero_the_middle(path):
    with path.open("r+b") as file:
        file.seek(100_000)
        file.write(bytes(200_000))


@each(
    "damage",
    [
        *(partial(os.truncate, length=size) for size in (0, 2_000, 100_000, 10_000_000)),
        lambda path: path.write_bytes(b"garbage"),
        zero_the_middle,
        lambda path: (path.unlink(), shutil.copy(_ctypes.__file__, path)),  # a library without the functions
        lambda path: (shutil.move(path, "elsewhere.so"), path.symlink_to(Path("elsewhere.so").absolute())),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: path.chmod(0o777),
    ],
)
def test_a_damaged_library_is_compiled_again_and_named(cache, compiler, damage, unloaded, said):
    shutil.rmtree(cache, ignore_errors=True)
    assert load() is not None
    assert calls() == 1 and names(cache) == {".lock", ".so"}
    (path,) = cache.glob("*.so")
    os.replace(shutil.copy(path, "copy.so"), path)  # what is loaded stays whole: its destructors run when Python ends
    damage(path)
    said()
    assert load() is not None and calls() == 1
    lines = [line for line in said().splitlines() if "compiled again" in line]
    assert len(lines) == 1 and str(path) in lines[0]
    assert load() is not None and calls() == 0, "it is mended"
    assert library._named(cache, path.read_bytes()) == path


def test_the_cache_serves_without_a_compiler_and_without_a_home(cache, compiler, unloaded, monkeypatch, said):
    assert load() is not None and calls() == 1
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(Path, "home", lambda: pytest.fail("the home is of no interest"))
    said()
    assert load() is not None
    assert not said()


def test_without_a_home_kernels_are_compiled_for_one_process(cache, compiler, unloaded, monkeypatch, said):
    monkeypatch.delenv("LOWBIT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert load() is not None and calls() == 1
    assert re.search(r"alone.*home directory.*Set LOWBIT_CACHE_DIR", said())
    assert not list(Path("temporary").iterdir()), "and nothing is left"


@each(
    "use, reason",
    [
        (lambda folder: folder.chmod(0o1777), "chmod go-w"),
        (lambda folder: folder.chmod(0o2775), "chmod go-w"),
        (lambda folder: folder.chmod(0o777), "chmod go-w"),
        (lambda folder: (folder.rmdir(), folder.touch()), "File exists|Not a directory"),
        (lambda folder: (folder.rmdir(), folder.symlink_to("nowhere")), "File exists|No such file"),
    ],
)
def test_a_cache_that_cannot_be_trusted_or_written_is_said(cache, compiler, use, reason, unloaded, said):
    if cache.is_dir():
        shutil.rmtree(cache)
    cache.unlink(missing_ok=True)
    cache.mkdir()
    use(cache)
    assert load() is not None and calls() == 1
    assert re.search(rf"for this process alone.*({reason}).*Set LOWBIT_CACHE_DIR", said())
    assert not list(Path("temporary").iterdir())
    assert not cache.is_dir() or not list(cache.iterdir())


def test_a_library_that_another_process_has_just_removed_is_not_damaged(tmp_path):
    path = tmp_path / "kernels.so"
    with path.open("w") as file:
        path.unlink()
        with pytest.raises(FileNotFoundError, match="was removed"):
            files._check(path, file.fileno())


def test_a_file_that_another_process_replaces_while_it_is_opened_is_read_again(cache, monkeypatch):
    write_figures("2-threads", FIGURES)
    opened, replacements = os.open, [FIGURES]

    def open_and_replace(path, *arguments, **options):
        descriptor = opened(path, *arguments, **options)
        if replacements and str(path).endswith(".json"):
            write_figures("2-threads", replacements.pop())
        return descriptor

    monkeypatch.setattr(files.os, "open", open_and_replace)
    assert read_figures("2-threads", FIELDS) == FIGURES and not replacements


def test_a_lock_file_that_is_a_link_leads_nowhere(cache, compiler, unloaded):
    victim = Path("victim").absolute()
    victim.write_text("precious")
    for make in (Path.symlink_to, Path.hardlink_to):
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()
        make(cache / f"{library._name()}.lock", victim)
        assert load() is not None
        assert victim.read_text() == "precious"


HOLD = """if True:
    import fcntl, os, sys, time
    with open(sys.argv[1], "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(os.getpid(), end="", file=lock, flush=True)
        print("held", flush=True)
        time.sleep(60)
"""


def test_a_builder_that_is_stopped_is_named_and_not_waited_for(cache, said):
    lock = cache / f"{library._name()}.lock"
    cache.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        try:
            with (
                pytest.raises(OSError, match=f"process {holder.pid} holds {lock} since more than 0 s"),
                files.one_builder(lock, silent=0.1, longest=0.3),
            ):
                pytest.fail("the lock is taken")
        finally:
            holder.kill()
    (line,) = said().splitlines()
    assert f"waits for its C++ kernels: process {holder.pid} holds {lock}" in line
    with files.one_builder(lock, longest=9):
        assert lock.read_text() == str(os.getpid()), "who builds now"


def test_what_a_dead_builder_left_goes_with_the_next_build(cache, compiler, unloaded):
    cache.mkdir()
    (cache / f"{library._name()}.so.{atomic_files._HOST}-1.partial").touch()
    assert load() is not None
    assert names(cache) == {".lock", ".so"}


@contextlib.contextmanager
def as_user(number):
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_users_load_only_what_they_or_the_administrator_own(whole, unloaded, monkeypatch, said):
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o1777)
        shutil.copy(whole, place)
        stand_in = Path(place, "compiler")
        stand_in.write_text(f'#!/bin/sh -p\nfor last; do :; done\ncp {place}/{whole.name} "$last"\n')
        stand_in.chmod(0o755)
        monkeypatch.setenv("CXX", str(stand_in))
        monkeypatch.setattr(tempfile, "tempdir", place)
        for builder, user, is_shared in [(0, 0, 1), (0, 12345, 1), (12345, 12345, 1), (12345, 0, 0), (12345, 12346, 0)]:
            folder = Path(place, f"{builder} {user}")
            monkeypatch.setenv("LOWBIT_CACHE_DIR", str(folder))
            with as_user(builder):
                assert load() is not None
            said()
            with as_user(user):
                assert load() is not None
            lines = said()
            assert ("belongs to another user" in lines) is not is_shared, (builder, user, lines)
            assert not list(Path(place).glob("lightning_lowbit*"))
        home = Path(place, "home")
        home.mkdir()
        os.chown(home, 12345, 12345)
        monkeypatch.setenv("LOWBIT_CACHE_DIR", str(home / ".cache"))
        assert load() is not None
        assert not list(home.iterdir()), "root leaves nothing in the folder of a user"


def test_nobody_exchanges_a_folder_that_was_checked(tmp_path):
    """On Linux the path leads to the folder itself, not to what has its name."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("there is no /proc")
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache/file").write_text("checked")
    with files.trusted(tmp_path / "cache") as folder:
        (tmp_path / "cache").rename(tmp_path / "aside")
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache/file").write_text("exchanged")
        assert files.read_trusted(folder / "file") == b"checked"


def test_a_cache_of_ones_own_is_closed_to_its_group_and_one_that_serves_others_is_left(cache, compiler, unloaded, said):
    cache.mkdir()
    (cache / "of others").touch()
    cache.chmod(0o775)
    assert load() is not None
    assert "chmod go-w" in said()
    assert cache.stat().st_mode & 0o777 == 0o775 and [path.name for path in cache.iterdir()] == ["of others"]
    (cache / "of others").unlink()
    assert load() is not None
    assert not cache.stat().st_mode & 0o022 and len([*cache.glob("*.so")]) == 1


FIELDS = "native", "emulated"
FIGURES = {"native": 0.5, "emulated": 0.75}


def file(cache, name="2-threads"):
    return cache / f"{library._name()}-{name}.json"


def test_figures_are_read_as_they_were_written_under_each_name(cache):
    assert read_figures("2-threads", FIELDS) is None
    write_figures("2-threads", FIGURES)
    assert [path.name for path in cache.iterdir()] == [file(cache).name]
    write_figures("1-threads", {"native": 0.25, "emulated": 1.0})
    assert read_figures("2-threads", FIELDS) == FIGURES
    assert read_figures("4-threads", FIELDS) is None


DAMAGED = [
    b"",
    b'{"native": 0.5, "emul',
    b"\xff\xfe",
    b"[" * 100_000,
    b"[0.5, 0.75]",
    b'{"native": 0.5}',
    b'{"native": 0.5, "emulated": 0.75, "more": 1.0}',
    *(b'{"native": 0.5, "emulated": %s}' % n for n in (b"0.0", b"-1.0", b"NaN", b"1e999", b'"1"', b"true", b"[]")),
]


@each("content", DAMAGED)
def test_what_is_damaged_is_not_taken(cache, content):
    cache.mkdir(exist_ok=True)
    file(cache).write_bytes(content)
    assert read_figures("2-threads", FIELDS) is None
    write_figures("2-threads", FIGURES)
    assert read_figures("2-threads", FIELDS) == FIGURES


def test_a_file_that_others_can_write_or_a_link_is_not_taken(cache, tmp_path):
    write_figures("2-threads", FIGURES)
    file(cache).chmod(0o666)
    assert read_figures("2-threads", FIELDS) is None
    victim = file(cache).rename(tmp_path / "victim")
    victim.chmod(0o644)
    file(cache).symlink_to(victim)
    assert read_figures("2-threads", FIELDS) is None
    write_figures("2-threads", {"native": 0.25, "emulated": 1.0})
    assert json.loads(victim.read_text()) == FIGURES


def test_a_folder_that_keeps_nothing_is_left_alone(cache):
    cache.touch()
    write_figures("2-threads", FIGURES)
    assert read_figures("2-threads", FIELDS) is None
    cache.unlink()
    cache.mkdir()
    cache.chmod(0o777)  # open to others
    write_figures("2-threads", FIGURES)
    assert read_figures("2-threads", FIELDS) is None and not list(cache.iterdir())


def write_and_read(number):
    for _ in range(40):
        write_figures("2-threads", {"native": number, "emulated": number})
        figures = read_figures("2-threads", FIELDS)
        if figures is None or figures["native"] != figures["emulated"]:
            return figures or "torn"
    return "whole"


@pytest.mark.slow
def test_processes_that_write_at_once_leave_a_whole_file(cache):
    assert os.environ["LOWBIT_CACHE_DIR"] == str(cache)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert [*pool.map(write_and_read, (1.0, 2.0))] == ["whole", "whole"]
    assert {path.suffix for path in cache.iterdir()} == {".json"}
