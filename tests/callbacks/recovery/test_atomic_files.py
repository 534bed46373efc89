"""What has its name is whole, and what dead processes left goes; what living ones write stays."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from lightning_lowbit import atomic_files
from tests.tables import each


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("old", ["nothing", "file", "directory", "link"])
@pytest.mark.parametrize("new", ["file", "directory", "link"])
def test_anything_takes_the_place_of_anything(old, new):
    def make(path, kind, content):
        if kind == "file":
            path.write_text(content)
        elif kind == "directory":
            path.mkdir()
            (path / "shard").write_text(content)
        elif kind == "link":
            Path(f"target {content}").mkdir()
            path.symlink_to(f"target {content}")

    path = Path("last.ckpt").absolute()
    make(path, old, "old")
    with atomic_files.being_written(path) as partial:
        make(partial, new, "new")
        atomic_files.put_in_place(partial, path)
    is_kind = {"file": path.is_file(), "directory": path.is_dir() and not path.is_symlink(), "link": path.is_symlink()}
    assert [kind for kind, found in is_kind.items() if found] == [new]
    assert {name for name in os.listdir() if name.startswith("last")} == {"last.ckpt"}


LEFT = f"{atomic_files._HOST}-1"


def leave(*names):
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()


def names():
    return {str(path) for path in Path().rglob("*") if path.is_file()}


def test_what_a_crash_left_is_removed_below_and_not_within_checkpoints(tmp_path):
    other = ("c.ckpt/d.ckpt.partial", "e.partial", "f.ckpt", "g.bin.partial")
    leave(f"a.ckpt.{LEFT}.partial", f"f.ckpt.{LEFT}.previous", f"loss/0.3.ckpt.{LEFT}.partial", *other)
    atomic_files.mend(tmp_path, ".ckpt")
    assert names() == set(other)


def test_what_had_the_name_before_is_found_and_put_back(tmp_path):
    leave(f"a.ckpt.{LEFT}.previous", f"b.ckpt.{LEFT}.previous", "b.ckpt")
    assert {path.name for path in atomic_files.named(tmp_path, ".ckpt")} == {f"a.ckpt.{LEFT}.previous", "b.ckpt"}
    atomic_files.mend(tmp_path, ".ckpt")
    assert names() == {"a.ckpt", "b.ckpt"}


def test_what_a_living_process_writes_stays(tmp_path):
    left, elsewhere = f"a.ckpt.{LEFT}.partial", "a.ckpt.elsewhere-1.partial"
    leave(left, elsewhere)
    with atomic_files.being_written(tmp_path / "b.ckpt") as partial:
        partial.touch()
        atomic_files.mend(tmp_path, ".ckpt")  # of another process, whose lock is another one
        assert names() == {partial.name, elsewhere}, "the lock does not hold"


WRITER = """if True:
    import sys
    from pathlib import Path
    from lightning_lowbit.atomic_files import being_written, put_in_place
    with being_written(Path(sys.argv[1])) as partial:
        partial.write_text("whole")
        print(partial.name, flush=True)
        sys.stdin.read()
        put_in_place(partial, Path(sys.argv[1]))
"""


@each("locks, dies", [(True, False), (True, True), (False, False), (False, True)])
def test_what_a_process_of_this_machine_writes_goes_when_it_is_dead_and_not_when_it_looks_old(
    locks, dies, tmp_path, monkeypatch
):
    """Clocks jump, and machines sleep."""
    command = [sys.executable, "-c", WRITER, tmp_path / "a.ckpt"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        partial = writer.stdout.readline().strip()
        monkeypatch.setattr(atomic_files.time, "time", lambda now=atomic_files.time.time: now() + 7200)
        if not locks:
            monkeypatch.setattr(atomic_files.fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks")))
        if dies:
            writer.kill()
            writer.wait()
        atomic_files.mend(tmp_path, ".ckpt")
        assert names() == (set() if dies else {partial})
        if not dies:
            writer.stdin.close()
            assert writer.wait() == 0 and names() == {"a.ckpt"}
    (tmp_path / "a.ckpt").unlink(missing_ok=True)


def test_what_another_machine_has_left_goes_after_an_hour(tmp_path, monkeypatch):
    leave("a.ckpt.elsewhere-1.partial", "b.ckpt.partial")
    atomic_files.mend(tmp_path, ".ckpt")
    assert len(names()) == 2, "it may be writing"
    monkeypatch.setattr(atomic_files.time, "time", lambda now=atomic_files.time.time: now() + 3601)
    atomic_files.mend(tmp_path, ".ckpt")
    assert not names()
