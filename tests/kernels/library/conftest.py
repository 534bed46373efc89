"""A cache in an empty folder, and a compiler that takes no time."""

import tempfile

import pytest

from lightning_lowbit.kernels.cpu import library
from tests.kernels.library.loads import forget


@pytest.fixture
def unloaded():
    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def whole():
    """The path of a library as the compiler wrote it."""
    library.library()
    paths = sorted(library._folder().glob(f"{library._name()}-*.so"))
    if not paths:
        pytest.skip("no C++ kernels are kept here")
    return paths[0]


@pytest.fixture
def compiler(whole, tmp_path, monkeypatch):
    """A stand-in for the compiler, which copies the library, and writes down that it linked."""
    path, counts = tmp_path / "compiler", f'case " $* " in *" -c "*) ;; *) echo >> {tmp_path}/calls;; esac'
    path.write_text(f'#!/bin/sh\nfor last; do :; done\n{counts}\ncp {whole} "$last"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    return folder


@pytest.fixture
def said(caplog):
    """Returns what was told since the last time."""
    caplog.set_level("INFO", "lightning_lowbit")

    def told():
        lines = caplog.messages[:]
        caplog.clear()
        return "\n".join(lines)

    return told
