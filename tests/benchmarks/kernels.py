"""The Triton kernels as machine code, compiled for GPUs that need not be there.

    python -m tests.benchmarks.kernels --aot [--arch 80 90 100] [--casts nvfp4 ...] [--json FILE]

For each kernel and architecture: registers, spilled bytes, shared memory, the bytes that an element moves against the
least, and its instructions in the machine code (of loops: in their bodies). From these follows what a GPU can do at
best, which is a prediction: nothing is measured.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit import Cast, LinearCasts
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.gpu import launches
from lightning_lowbit.kernels.gpu.launches import Launch
from lightning_lowbit.nn import OPERANDS, PRESETS
from lightning_lowbit.quant.operand import operand_dtype

ARCHITECTURES = (80, 90, 100)
SHAPE = (8192, 4096)  # of the operands: multiples of 16, as the sizes of layers are

_NAMES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Gpu(NamedTuple):
    """Data sheet: bytes per second, multiprocessors and clock. Each of these issues 4 instructions of 32 threads."""

    name: str
    arch: int
    bandwidth: float
    multiprocessors: int
    clock: float


GPUS = (Gpu("H100 SXM", 90, 3.35e12, 132, 1.755e9), Gpu("B200", 100, 8.0e12, 148, 1.85e9))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cast_launch(cast: Cast, dim: int, dtype: torch.dtype = torch.bfloat16) -> Launch:
    """The launch that casts a matrix of ``SHAPE``."""
    x, one = meta(*SHAPE, dtype=dtype), meta()
    out = operand_dtype(dtype, cast)
    values, key = meta(*SHAPE, dtype=out), meta(dtype=torch.int64)
    sums = meta(launches.SUMS, dtype=torch.float64) if cast.scale.statistic == "absmean" else None
    factor = meta(*((1, SHAPE[1]) if dim == 0 else (SHAPE[0], 1))) if cast.scale.block == "row" else meta()
    return launches.of_cast(x, cast, dim, key, one, None, sums, values, factor)


def every_launch(names: list[str]) -> Iterator[tuple[str, Launch]]:
    """What the operands of presets launch, by name, each kernel once."""
    found: dict[tuple[Cast, int], str] = {}
    for name in names:
        casts = LinearCasts.preset(name)
        for operand in OPERANDS:
            cast = getattr(casts, operand)
            if isinstance(cast, Cast):
                for dim in (1, 0):
                    if cast.scale.block != "tensor" or dim == 1:
                        found.setdefault((cast, dim), name)
    for (cast, dim), name in found.items():
        along = (
            ""
            if cast.scale.block == "tensor" or isinstance(cast.scale.block, tuple)
            else (" rows", " columns")[1 - dim]
        )
        yield f"{cast}{along}", cast_launch(cast, dim)


def compile_for(launch: Launch, arch: int) -> Any:
    """Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = gpu._kernels()[0]
    constants, signature, attributes = gpu.compiled_for(launch), {}, {}
    kernel = getattr(kernels, launch.kernel)
    for position, name in enumerate(kernel.arg_names):
        value = launch.arguments.get(name)
        if name in constants:
            signature[name] = "constexpr"
        elif value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = _NAMES[value.dtype] if isinstance(value, Tensor) else "i32"
            if isinstance(value, Tensor) or value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()}, attributes)
    options = {"num_warps": launch.warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
