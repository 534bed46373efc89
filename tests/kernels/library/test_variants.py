"""The libraries of a wheel: each CPU gets the best one for it, which uses all that the sources would use there."""

import shutil
import subprocess

import pytest

from lightning_lowbit.kernels.cpu.variants import SOURCE, VARIANTS, library_of_wheel
from tests.tables import each

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
