"""Building the C++ kernels: once, by one process, without harm where it cannot be done; and libraries of wheels."""

import _ctypes
import random
import shutil
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_lowbit import LinearCasts
from lightning_lowbit.kernels import kernel_support, quantize_operand
from lightning_lowbit.kernels.cpu import library
from lightning_lowbit.kernels.cpu.variants import SOURCE, VARIANTS, library_of_wheel
from lightning_lowbit.quant import quantize_operand as plain
from tests.kernels.library.loads import calls, load, names, start
from tests.tables import each


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder in which builders were killed, and what three said that then started at once."""
    folder, draw = tmp_path_factory.mktemp("built"), random.Random(0)
    for _ in range(6):
        process = start(folder)
        while not list(folder.glob("*.lock")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 6))
        process.kill()
        process.communicate()
        for path in folder.glob("*.so"):  # it was quick
            path.unlink()
    return folder, [process.communicate() for process in [start(folder) for _ in range(3)]]


@pytest.mark.slow
def test_of_processes_that_start_at_once_one_builds(built):
    _, results = built
    assert [out.split() for out, _ in results] == [["cpp", "32.0"]] * 3, results
    assert sum("compiles its C++ kernels" in err for _, err in results) == 1, "one of them says that it builds"


@pytest.mark.slow
def test_killed_builders_leave_nothing_once_another_has_built(built):
    assert sorted(path.suffix for path in built[0].iterdir()) == [".lock", ".so"]


@each(
    "script, message",
    [
        ("[ $1 = --version ] && exit 0; echo this is broken >&2; exit 1", "this is broken"),
        ("exit 0", r"made no library that loads"),
        ('for last; do :; done; : > "$last"', r"made no library that loads.*file too short"),
        (f'for last; do :; done; cp {_ctypes.__file__} "$last"', "made no library that loads.*undefined symbol"),
        ('for last; do :; done; echo half > "$last"; echo No space left on device >&2; exit 1', "No space left"),
    ],
)
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(cache, compiler, script, message, unloaded):
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    with pytest.warns(UserWarning, match=f"(?s)cannot be built here.*{message}"):
        assert load() is None
    assert names(cache) == {".lock"} and not list(Path("temporary").iterdir())


def test_a_compiler_may_have_arguments_or_a_path_with_spaces(cache, compiler, unloaded, monkeypatch):
    spaced = compiler.with_name("the compiler")
    shutil.copy(compiler, spaced)
    for name in (f"{compiler} -O1", str(spaced)):
        monkeypatch.setenv("CXX", name)
        shutil.rmtree(cache, ignore_errors=True)
        assert load() is not None and calls() == 1


def test_a_compiler_that_does_not_end_is_not_tried_elsewhere(cache, compiler, unloaded, monkeypatch):
    monkeypatch.setattr(library.subprocess, "run", mock.Mock(side_effect=subprocess.TimeoutExpired("g++", 600)))
    with pytest.warns(UserWarning, match="cannot be built here .*timed out"):
        assert load() is None
    assert names(cache) == {".lock"}


def test_without_a_compiler_plain_code_runs_after_one_warning(cache, monkeypatch, unloaded):
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    x, cast = torch.randn(8, 32), LinearCasts.preset("nvfp4").fprop_x
    with pytest.warns(UserWarning, match=r"cannot be built .*no C\+\+ compiler was found.*Install g\+\+") as warned:
        values = quantize_operand(x, cast, 1).values
    quantize_operand(x.bfloat16(), cast, 1)
    assert len(warned) == 1
    assert torch.equal(values, plain(x, cast, 1).values)
    assert kernel_support([cast]) == {cast: "plain code: the C++ kernels cannot be built"}


V3 = VARIANTS["x86_64"]["avx2"].features.split()
V4 = VARIANTS["x86_64"]["avx512"].features.split()


@pytest.fixture
def folder(tmp_path):
    """All libraries of both machines."""
    for variants in VARIANTS.values():
        for name in variants:
            (tmp_path / f"{name}-0.so").touch()
    return tmp_path


@each(
    "features, name",
    [
        (["sse4_2", "avx"], None),
        (["avx2"], None),
        (V3, "avx2"),
        ([*V3, "avx_vnni"], "avx_vnni"),
        ([*V4, "amx_tile"], "avx512"),
        ([*V4, "avx_vnni"], "avx512"),
        ([*V4, "avx512_vnni", "avx_vnni"], "avx512_vnni"),
        (["fp", "asimd", "crc32"], "neon"),
        (["fp", "asimd", "asimddp"], "neon"),
        (["fp", "asimd", "asimddp", "atomics", "asimdrdm", "crc32"], "neon_dot_products"),
        ([], None),
    ],
)
def test_a_cpu_gets_the_best_library_that_it_runs(folder, features, name):
    assert library_of_wheel(folder, features) == (name and folder / f"{name}-0.so")


def test_a_library_that_is_missing_leaves_the_next_best(folder):
    (folder / "avx512-0.so").unlink()
    assert library_of_wheel(folder, V4) == folder / "avx2-0.so"
    assert library_of_wheel() is None, "sources bring none"


def code(*flags):
    """What a compiler reads of the sources for an instruction set."""
    lines = [line for path in sorted(SOURCE.iterdir()) for line in path.read_text().splitlines()]
    text = "\n".join(line for line in lines if not line.startswith("#include"))
    command = ["g++", *flags, "-E", "-P", "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_library_for_this_cpu_uses_what_the_sources_would_use(folder):
    path = library_of_wheel(folder)
    if path is None:
        pytest.skip("a wheel has no library for this CPU")
    name = path.stem.removesuffix("-0")
    (flags,) = (variants[name].flags for variants in VARIANTS.values() if name in variants)
    assert code(*flags.split()) == code("-march=native") != code()
