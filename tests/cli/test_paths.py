"""Paths that the system refuses: one line that says what to do, for every command that takes one."""

import contextlib
import os
import re
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from lightning_lowbit import cli
from tests.tables import each

INSPECT = ["inspect", "a.pt", "--casts=nvfp4"]
EXPORT = ["export", "--format=int4"]
HOME, CIRCLE, LONG = "without '~'", "lead in a circle", "Give a shorter name"
ANOTHER, PERMISSIONS, FILE = "Give another path", "change the permissions there", "give a file"


@pytest.fixture
def paths(tmp_path, monkeypatch):
    torch.save({"a.weight": torch.randn(8, 16)}, "a.pt")
    for name in ("folder", "folder.png"):
        Path(name).mkdir()
    Path("file").touch()
    for name, target in (("full.png", "/dev/full"), ("loop", "loop"), ("dangling", "nowhere")):
        Path(name).symlink_to(target)
    Path("locked").mkdir(mode=0o500)
    for name in ("secret.pt", "secret.yaml", "secret.json"):
        Path(name).touch(mode=0)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    # As short as the errors that follow need: drawing takes longer than all else.
    monkeypatch.setattr(Figure, "savefig", lambda self, output, **_: output.write_text("a picture"))


@contextlib.contextmanager
def as_nobody(is_needed):
    """Root may read and write everything."""
    is_root = is_needed and os.geteuid() == 0
    if is_root:
        os.seteuid(12345)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@each(
    "arguments, advice",
    [
        ([*INSPECT, "--output=folder.png"], FILE),
        ([*INSPECT, "--output=file/x.png"], ANOTHER),
        ([*INSPECT, "--output=full.png"], "Make room there"),
        ([*INSPECT, "--output=loop/x.png"], ANOTHER),
        ([*INSPECT, "--output=sub/.."], "is the name of a picture"),
        ([*INSPECT, f"--output={'x' * 300}.png"], LONG),
        ([*INSPECT, "--output=locked/x.png"], PERMISSIONS),
        (["inspect", "loop", "--casts=nvfp4"], CIRCLE),
        (["inspect", "~nobody_there/a.pt", "--casts=nvfp4"], HOME),
        (["inspect", "x" * 5000, "--casts=nvfp4"], LONG),
        (["inspect", "secret.pt", "--casts=nvfp4"], PERMISSIONS),
        (["inspect", "dangling", "--casts=nvfp4"], "There is no dangling. Give a Lightning .ckpt"),
        (["cp", "nope", "x.yaml"], "lowbit cp nope: no such file, and no recipe"),
        (["cp", "quickstart", "loop/x.yaml"], ANOTHER),
        (["cp", "quickstart", "file/"], ANOTHER),
        (["cp", "quickstart", "~nobody_there/x"], HOME),
        (["cp", "quickstart", "locked/x"], PERMISSIONS),
        (["cp", "quickstart", "x" * 300], LONG),
        (["cp", "quickstart", "dangling"], "exists already"),
        (["fit", "--config=folder"], "no such file"),
        (["fit", "--config=secret.yaml"], PERMISSIONS),
        (["fit", "--config=~nobody_there/x"], HOME),
        (["fit", "--config=a.pt"], "give a YAML file"),
        ([*EXPORT, "loop", "--output=out"], CIRCLE),
        ([*EXPORT, "secret.pt", "--output=out"], PERMISSIONS),
        ([*EXPORT, "~nobody_there/x", "--output=out"], HOME),
        ([*EXPORT, "a.pt", "--output=sub/.."], "is a folder to make"),
        ([*EXPORT, "a.pt", "--output=locked/x"], PERMISSIONS),
        (["compare", "--from=folder"], FILE),
        (["compare", "--from=loop"], CIRCLE),
        (["compare", "--from=secret.json"], PERMISSIONS),
        (["compare", "--study=secret.yaml"], PERMISSIONS),
    ],
)
def test_what_the_system_refuses_is_said_with_what_to_do(arguments, advice, capsys, paths):
    with as_nobody(re.search("locked|secret", " ".join(arguments))):
        assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("lowbit: error: ") and advice in line


@each(
    "error, advice",
    [
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "Make room there"),
        (OSError(30, "Read-only file system", "x"), "Nothing can be written there"),
        (OSError(16, "Device or resource busy", "x"), "It is in use"),
    ],
)
def test_errors_of_libraries_in_rust_count_as_those_of_the_system(error, advice, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr("lightning_lowbit.cli.command._copy", fail)
    assert cli.main(["cp"]) == 2
    assert advice in capsys.readouterr().err
