"""Building the C++ kernels: once, by one process, without harm where it cannot be done."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_lowbit import LinearCasts
from lightning_lowbit.kernels import coverage, quantize_operand
from lightning_lowbit.kernels.cpu import casts, library
from lightning_lowbit.quant import quantize_operand as plain

CAST = """
import torch
from lightning_lowbit import LinearCasts
from lightning_lowbit.kernels import coverage, quantize_operand
cast = LinearCasts.preset("mxfp8").fprop_x
print(*coverage([cast]).values(), quantize_operand(torch.ones(2, 16), cast, 1).values.sum().item())
"""


def start(folder, **environment):
    """A process that casts a matrix, with its cache in a folder."""
    environment = {**os.environ, "LOWBIT_CACHE_DIR": str(folder), **environment}
    return subprocess.Popen([sys.executable, "-c", CAST], env=environment, text=True, stdout=-1, stderr=-1)


@pytest.fixture
def unloaded():
    """The kernels are loaded anew within a test, and after it."""
    for function in (library.library, library._loaded, casts.plan_of):
        function.cache_clear()
    yield
    for function in (library.library, library._loaded, casts.plan_of):
        function.cache_clear()


@pytest.mark.slow
def test_processes_that_start_at_once_build_one_library(tmp_path):
    results = [process.communicate() for process in [start(tmp_path) for _ in range(3)]]
    assert [out.split() for out, _ in results] == [["cpp", "32.0"]] * 3, results
    assert len(list(tmp_path.glob("*.so"))) == 1
    assert sum("compiles its C++ kernels" in err for _, err in results) == 1, "one of them says that it builds"


@pytest.mark.slow
def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    out, err = start(tmp_path / "file" / "folder", TMPDIR=str(tmp_path)).communicate()
    assert out.split() == ["cpp", "32.0"], err
    assert list(tmp_path.glob("lightning_lowbit_*/*.so")), "the folder for temporary files is used"


def test_without_a_compiler_plain_code_runs_after_one_warning(tmp_path, monkeypatch, unloaded):
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    x, cast = torch.randn(8, 32), LinearCasts.preset("nvfp4").fprop_x
    with pytest.warns(UserWarning, match=r"cannot be built .*no C\+\+ compiler was found.*Install g\+\+") as said:
        values = quantize_operand(x, cast, 1).values
    quantize_operand(x.bfloat16(), cast, 1)
    assert len(said) == 1
    assert torch.equal(values, plain(x, cast, 1).values)
    assert coverage([cast]) == {cast: "plain code: the C++ kernels cannot be built"}


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch, unloaded):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho this is broken >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match="this is broken"):
        assert library.library() is None
    assert not list((tmp_path / "cache").glob("*.so")), "nothing half-built is left"


def test_a_library_of_another_user_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    built = []
    monkeypatch.setattr(library, "_compile", lambda compiler, target: built.append(target) or target.touch())
    first = library._built()
    assert library._built() == first and len(built) == 1, "an own one is taken"
    monkeypatch.setattr(os, "getuid", lambda: first.stat().st_uid + 1)
    if first.stat().st_uid != 0:
        library._built()
        assert len(built) == 2, "that of another user is replaced"


def run_casts(folder, flags, **environment):
    """Runs the tests of casts in a process whose kernels are compiled with further flags."""
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {flags}\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "LOWBIT_CACHE_DIR": str(folder), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(Path(__file__).with_name("test_casts.py"))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert list(folder.glob("*.so")), "kernels were built"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of instruction sets of x86-64")
@pytest.mark.parametrize("instructions", ["x86-64", "haswell"])
def test_older_instruction_sets_give_the_same_bits(tmp_path, instructions):
    run_casts(tmp_path, f"-march={instructions}")
