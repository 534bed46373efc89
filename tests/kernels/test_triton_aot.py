"""The Triton kernels compiled for GPUs that need not be there."""

import importlib.util
import itertools
import re
from importlib.metadata import version

import pytest
import torch

from lightning_lowbit import Cast, Scale
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.gpu import launches, sizes, stacks
from lightning_lowbit.nn import PRESETS
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.operand import empty_operand
from lightning_lowbit.quant.packed import packed_bytes
from lightning_lowbit.quant.shard import Shard
from tests.benchmarks import kernels
from tests.benchmarks.kernels import meta
from tests.kernels import steps
from tests.quant.tensors import NVFP4, NVFP4_TILES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
ALL = [name for name in PRESETS if name != "bf16"]
STOCHASTIC = NVFP4.replace(rounding="stochastic")

# Registers of a thread, and bytes spilled, where Triton 3.6 finds no order of instructions with fewer.
TRITON_3_6 = {
    ("e2m1/e4m3:1x16+fp32:row~ along columns", 100): (180, 0),
    ("e2m1/e4m3:1x16+fp32~ along columns, for native GEMMs", 100): (255, 24),
    ("e2m1/e4m3:1x16+fp32~ along rows and columns, for native GEMMs", 90): (255, 8),
    ("e2m1/e4m3:1x16+fp32~ along rows and columns, for native GEMMs", 100): (255, 32),
}


def bounds_of(name, arch, most=255):
    """The registers that a thread may take, and the bytes that it spills."""
    return TRITON_3_6.get((name, arch), (most, 0)) if version("triton").startswith("3.6.") else (most, 0)


def wrong_arithmetic(ptx, fused):
    """Instructions that flush subnormal numbers, approximate, or round a product and a sum at once, but for products
    with the 1.5 · 2^k of rounding: these are exact, because the other factor is a power of two."""
    found = re.findall(r"^\s+(\S*(?:\.ftz|\.approx|div\.full)\S*)\s", ptx, re.MULTILINE)
    products = re.findall(r"^\s+((?:fma|mad)\.rn\.f\S+)\s([^;]*);", ptx, re.MULTILINE)
    inexact = [name for name, rest in products if not re.search(r"0f[0-9A-F]{2}[4C]00000", rest)]
    return found if fused else found + inexact


@pytest.mark.parametrize("arch", kernels.ARCHITECTURES)
def test_kernels_of_all_presets_compile_and_nothing_spills(arch):
    for name, launch in kernels.every_launch(ALL):
        if "native" in name and arch < 90:  # whose GEMMs are newer
            continue
        alone = "native" in name or "corrected" in name  # a warp has whole blocks
        most, spilled = bounds_of(name, arch, 255 if alone else 168)
        code = kernels.resources_of(launch, arch)
        assert code.spilled == spilled and code.registers <= most, f"{name}: {code}"


def other_launches():
    """Operands in other dtypes, layouts and places than those of the benchmark."""
    casts = NVFP4, STOCHASTIC, NVFP4_TILES, Cast("int8", Scale("fp32", "row")), Cast("e4m3", Scale("fp32", "tensor"))
    matrices = meta(512, 256), meta(512, 256, dtype=torch.float16), meta(256, 512, dtype=torch.bfloat16).t()
    for cast, x, dim in itertools.product(casts, (*matrices, meta(33, 7)), (0, 1)):
        key, place = meta(dtype=torch.int64), Shard("group", 0, 0, len(x), 2 * len(x))
        call = CastCall(cast, dim, key, None, torch.float32, place)
        lines = sizes.amaxes_of_lines(x, call)
        amax = meta(lines) if lines else meta()
        yield cast, launches.cast_launch(x, call, amax, None, *gpu._filled(empty_operand(x, call)))
    yield from stack_launches()
    for element, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("int8", torch.int8)):
        cast, x = Cast(element, Scale("fp32", "row")), meta(512, 256)
        call = CastCall(cast, 1, dtype=dtype)
        yield cast, launches.cast_launch(x, call, None, None, *gpu._filled(empty_operand(x, call)))


def stack_launches():
    """Operands of all products of a stack, and their amaxes: grouped rows, and matrices of weights."""
    ends = tuple(range(16, 528, 16))
    mxfp8, rows, tensor = (Cast("e4m3", Scale(*s)) for s in (("e8m0", 32), ("fp32", "row"), ("fp32", "tensor")))
    cases = [(NVFP4, 0, 0), (STOCHASTIC, 1, 0), (STOCHASTIC, 0, 16), (NVFP4_TILES, 1, 0)]
    for cast, dim, size in [*cases, (mxfp8, 0, 0), (rows, 1, 0), (rows, 0, 0), (tensor, 1, 0)]:
        for shape, places in (((512, 256), ends), ((32, 64, 256), None)):
            x = meta(*shape, dtype=torch.bfloat16)
            call = CastCall(cast, dim, meta(32, dtype=torch.int64), rotation=meta(32, size) if size else None)
            values = meta(*x.shape, dtype=torch.bfloat16)
            factor = meta(sum(x.shape) * 256)
            yield cast, stacks.cast_launch(x, call, places, meta(32) if cast.scale.needs_amax else None, values, factor)
            if cast.scale.needs_amax:
                yield cast, stacks.amax_launch(x, call, places, meta(32))


def packing_launches():
    x, factor = meta(512, 256, dtype=torch.bfloat16), meta()
    for cast, dim in kernels.casts_of(["nvfp4", "mxfp8", "int4"]):
        if gpu.packs(cast, x, dim):
            key, data = meta(dtype=torch.int64), meta(packed_bytes(512, 256, cast, dim), dtype=torch.uint8)
            yield cast, launches.pack_launch(x, CastCall(cast, dim, key), meta(), data, factor)
            yield cast, launches.unpack_launch(data, cast, dim, x.dtype, meta(512, 256, dtype=torch.bfloat16))


@pytest.mark.parametrize("arch", kernels.ARCHITECTURES)
def test_all_other_kernels_compile_and_nothing_spills(arch):
    """Also those of optimizers, where memory that is not aligned takes an address for each element."""
    bounds = [(launch, 255) for _, launch in (*other_launches(), *packing_launches())]
    bounds += [(launch, 96) for launch in steps.launches(steps.ALIGNED)]
    bounds += [(launch, 224) for launch in steps.launches([(33, 130)])]
    for launch, most in bounds:
        code = kernels.resources_of(launch, arch)
        assert code.spilled == 0 and code.registers <= most, f"{launch.kernel}, {launch.constants}: {code}"


def check_code(name, launch, fused, least):
    """Arithmetic is that of IEEE, and as many loads and stores as ``least`` move 16 bytes."""
    ptx = kernels.compile_for(launch, 90).asm["ptx"]
    found, wide = wrong_arithmetic(ptx, fused), len(re.findall(r"(?:ld|st)\.global\.v4\.b32", ptx))
    assert not found, f"{name}: {found}"
    assert wide >= least, f"{name}: {wide}"


def test_arithmetic_is_that_of_ieee_and_memory_moves_16_bytes_at_a_time():
    """Of stochastic rounding, one product is exact and therefore fused; so are, in optimizers, the interpolation, as in
    torch, and an exact product."""
    for name, launch in kernels.every_launch(ALL):
        check_code(name, launch, "~" in name or "stochastic" in name, 1 if launch.kernel == "measure" else 2)
    for launch in steps.launches(steps.ALIGNED):
        fused, wide = launch.constants.get("PASS") == "update", int(launch.kernel != "sum_partials")
        check_code(f"{launch.kernel} {launch.constants}", launch, fused, wide)


class Driver:
    """What Triton asks of a GPU before it compiles a kernel, and when it launches one: grids and arguments go to
    ``launches``."""

    def __init__(self):
        self.utils, self.launches = self, []

    def load_binary(self, *arguments):
        return 1, 2, 32, 0, 1024  # a module, a function, registers, spilled bytes, threads

    def get_device_properties(self, device):
        return {"max_shared_mem": 2**17}

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.launches.append((arguments[:3], arguments[9:]))

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_device_interface(self):
        return torch.cpu

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def test_launches_pass_what_kernels_take_and_later_ones_what_triton_binds_at_the_first(monkeypatch):
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", active := Driver())
    for name, launch in kernels.every_launch(["nvfp4", "fp8-row", "ternary"]):
        kernel = getattr(gpu._kernels()[0], launch.kernel)
        given = {**launch.arguments, **gpu.compiled_for(launch, 90), **gpu.options_of(launch)}
        compiled = kernel.warmup(**given, grid=(launch.programs,))
        assert (compiled.metadata.num_warps, compiled.metadata.enable_fp_fusion) == (launch.warps, False), name
        active.launches.clear()
        gpu.run(launch)
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "_kernels", None)  # the first launch alone asks for the kernel
            gpu.run(launch)
        first, second = active.launches
        assert first[0] == second[0] == (launch.programs, 1, 1), name
        assert all(one is other or one == other for one, other in zip(first[1], second[1], strict=True)), name
