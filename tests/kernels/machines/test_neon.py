"""The kernels for ARM, cross-compiled as for the wheel and run under QEMU, give the bits of this CPU's."""

import runpy
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_lowbit.kernels import backend, pack_operand, quantize_operand, unpack_operand
from lightning_lowbit.quant.call import CastCall
from tests.kernels.gemms.products import Product, products
from tests.kernels.machines.replay import Machine
from tests.kernels.memory.signs import _flat
from tests.kernels.test_casts import COVERED, VALUES, keyed, same_bits

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ROOT = Path(__file__).parents[3]
# By the name of a library: a CPU of QEMU that has its instructions, and which of them multiply bytes.
CPUS = {"neon": ("cortex-a53", "plain loops"), "neon_dot_products": ("cortex-a76", "NEON dot products")}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        None in map(shutil.which, (COMPILER, EMULATOR)),
        reason="Debian's g++-aarch64-linux-gnu and qemu-user are not installed",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The libraries of the wheel, and the program that calls them."""
    folder = tmp_path_factory.mktemp("aarch64")
    runpy.run_path(str(ROOT / ".ci" / "wheels"))["compile_variants"]("aarch64", folder / "libraries")
    command = [COMPILER, "-O1", "-fopenmp", Path(__file__).with_name("replay.cpp"), "-o", folder / "replay", "-ldl"]
    subprocess.run([*command, "-Wl,--no-as-needed"], check=True)
    return folder


@pytest.fixture(params=CPUS)
def machine(request, folder):
    cpu, instructions = CPUS[request.param]
    (library,) = folder.glob(f"libraries/{request.param}-*.so")
    with Machine([EMULATOR, "-cpu", cpu, "-L", "/usr/aarch64-linux-gnu", folder / "replay", library]) as machine:
        assert machine.instructions() == instructions
        yield machine


def check(machine, make):
    with backend("cpp"):
        expected = _flat(make())
        with machine.serving():
            found = _flat(make())
    assert len(found) == len(expected) and all(map(same_bits, found, expected)), str(make)


def test_a_thousand_products(machine, threads):
    for number, one in enumerate(products(1000)):
        threads(1 + number % 3)
        check(machine, partial(Product.by_cpp, one))


def calls():
    """Casts of all kinds, with matrices of all kinds of values."""
    torch.manual_seed(0)
    for number, cast in enumerate(sorted(COVERED, key=str)):
        drawn = cast if cast.scale.correction else cast.replace(rounding="stochastic")
        for dim in (0, 1):
            for shape in ((33, 48), (16, 320)):
                dtype = (torch.float32, torch.bfloat16)[(number + dim + shape[0]) % 2]
                for rounded in (cast, drawn):
                    yield torch.randn(shape).to(dtype), CastCall(rounded, dim, keyed(rounded))
            for change in VALUES.values():
                yield change(torch.randn(17 + dim, 72)).bfloat16(), CastCall(cast, dim, keyed(cast))


def test_casts_and_codes_and_back(machine, threads):
    for number, (x, call) in enumerate(calls()):
        threads(1 + number % 3)
        check(machine, partial(quantize_operand, x, call.cast, call.dim, call.key))
        check(machine, partial(pack_operand, x, call.cast, call.dim, call.key))
        packed = pack_operand(x, call.cast, call.dim, call.key)
        check(machine, partial(unpack_operand, packed, call.cast, call.dim, x.shape, x.dtype))
