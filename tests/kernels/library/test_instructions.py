"""Kernels for each instruction set, each built once: the same bits. What a CPU with AVX2 lacks is emulated."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.cpu.variants import cpu
from tests.kernels.gemms import products
from tests.kernels.library.loads import compiler_with

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="names of instruction sets of x86-64"),
    pytest.mark.skipif(library() is None, reason="the C++ kernels cannot be built"),
]
KERNELS = Path(__file__).parents[1]

# Flags of g++, and what they need of the CPU.
BUILDS = {
    "plain loops": ("-march=x86-64", ""),
    "AVX2": ("-march=x86-64-v3", "avx2"),
    "AVX-VNNI": ("-march=x86-64-v3 -mavxvnni", "avx2 avx_vnni"),
    "AVX-512": ("-march=skylake-avx512", "avx512bw avx512vl avx512dq avx512cd"),
    "AVX-512 VNNI": ("-march=x86-64-v4 -mavx512vnni", "avx512bw avx512_vnni"),
}

# What takes the code for the instructions of emulator/immintrin.h.
EMULATED = {
    "AVX-VNNI": "-DEMULATED_AVXVNNI",
    "AVX-512": "-D__AVX512BW__",
    "AVX-512 VNNI": "-D__AVX512BW__ -DEMULATED_AVX512VNNI",
}


def flags_of(name):
    """None where this CPU cannot run such a build."""
    (flags, needs), features = BUILDS[name], {*cpu().split()}
    if {*needs.split()} <= features:
        return flags
    if not {"avx2", "fma", "f16c"} <= features:
        return None
    return f"-march=x86-64-v3 -I{KERNELS / 'emulator'} {EMULATED[name]}"


@pytest.fixture(scope="module")
def expected():
    return products.checksum(400)


@pytest.fixture(scope="module", params=[name for name in BUILDS if flags_of(name) is not None])
def build(request, tmp_path_factory):
    """Its name, and a function that runs a module of Python with it."""
    environment = compiler_with(flags_of(request.param), tmp_path_factory.mktemp("build"))

    def run(*command):
        command, options = [sys.executable, "-m", *command], {"env": environment, "cwd": KERNELS.parents[1]}
        done = subprocess.run(command, **options, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return request.param, run


def test_products_have_the_same_bits(build, expected):
    name, run = build
    assert run("tests.kernels.gemms.products").splitlines() == [name, expected]


def test_casts_are_those_of_plain_code(build):
    name, run = build
    if name in ("plain loops", "AVX2"):  # those of this CPU run in all other tests
        run("pytest", "-q", "-n", "0", str(KERNELS / "test_casts.py"))
