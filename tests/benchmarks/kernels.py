"""The Triton kernels as machine code, for GPUs that need not be there. :mod:`tests.gpu` times them where there is one.

    python -m tests.benchmarks.kernels [--arch 80 90 100] [--presets nvfp4 ...] [--json FILE]

For each kernel and architecture: registers, spilled bytes, shared memory, bytes per element and the least, and
instructions per element in the machine code. What a GPU does at best with them is a prediction: a bound from memory,
from the instructions that a multiprocessor issues, and from those of them that half of its lanes execute.
"""

import argparse
import inspect
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit import Cast, LinearCasts
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.gpu import launches, sizes
from lightning_lowbit.kernels.gpu.launches import Launch
from lightning_lowbit.kernels.layout import empty_laid_out
from lightning_lowbit.nn import OPERANDS, PRESETS
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.operand import empty_operand

ARCHITECTURES = (80, 90, 100)
SHAPE = (8192, 4096)  # of the operands: multiples of 16, as the sizes of layers are
ELEMENTS = SHAPE[0] * SHAPE[1]

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

# Instructions that half of the lanes of a multiprocessor execute (CUDA programming guide, throughput of instructions).
_HALF_RATE = re.compile(
    r"(LOP3|SHF|V?I(?!MAD)MNMX3?|VIMNMX3?|FMNMX3?|F?SEL|[FI]SETP|PLOP3|PRMT|LEA|IADD3|VIADD|IABS|F2FP|I2FP|SGXT|BMSK)\b"
)
_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([^;]*);", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_x_\d+):", re.MULTILINE)


class Gpu(NamedTuple):
    """Bytes per second and multiprocessors of a data sheet, and an assumed clock."""

    name: str
    arch: int
    bandwidth: float
    multiprocessors: int
    clock: float

    def limits(self, size: float, instructions: float, half_rate: float) -> dict[str, float]:
        """Seconds per element by what bounds them: 4 instructions of 32 threads issue per clock."""
        lanes = self.multiprocessors * 128 * self.clock
        return {"memory": size / self.bandwidth, "issue": instructions / lanes, "half rate": 2 * half_rate / lanes}


GPUS = (Gpu("H100 SXM", 90, 3.35e12, 132, 1.7e9), Gpu("B200", 100, 8.0e12, 148, 1.8e9))


class Code(NamedTuple):
    """What a compiled kernel needs, and its instructions per element, all and those of half the rate."""

    registers: int
    spilled: int
    shared: int
    instructions: float = 0
    half_rate: float = 0


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_of(
    cast: Cast, dim: int, dtype: torch.dtype = torch.bfloat16, size: int = 0, target: torch.dtype | None = None
) -> Launch:
    """The launch that casts a matrix of ``SHAPE`` whose amax is known, rotated in groups of ``size`` unless it is 0."""
    x, key = meta(*SHAPE, dtype=dtype), meta(dtype=torch.int64)
    sums = meta(launches.SUMS, dtype=torch.float64) if cast.scale.statistic == "absmean" else None
    call = CastCall(cast, dim, key, rotation=meta(size) if size else None, dtype=target)
    lines = sizes.amaxes_of_lines(x, call)
    return launches.cast_launch(x, call, meta(lines) if lines else meta(), sums, *gpu._filled(empty_operand(x, call)))


def layout_of(cast: Cast, block: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> Launch:
    """The launch that casts it for a native GEMM with a scale for each ``block`` elements."""
    x, call = meta(*SHAPE, dtype=dtype), CastCall(cast, dim, meta(dtype=torch.int64), block=block)
    return launches.layout_launch(x, call, meta(), *empty_laid_out(x, call))


def layouts_of(casts: tuple[Cast, Cast], block: int, dtype: torch.dtype = torch.bfloat16) -> Launch:
    """The launch that casts it along rows and along columns."""
    x, key = meta(*SHAPE, dtype=dtype), meta(dtype=torch.int64)
    row, column = (CastCall(cast, dim, key, block=block) for cast, dim in zip(casts, (1, 0), strict=True))
    return launches.layouts_launch(x, (row, column), meta(), [empty_laid_out(x, call) for call in (row, column)])


def casts_of(presets: list[str]) -> list[tuple[Cast, int]]:
    """The casts of the operands of presets that have kernels, each once, with the dimensions that differ."""
    found: dict[tuple[Cast, int], None] = {}
    for name in presets:
        casts = LinearCasts.preset(name)
        for operand in OPERANDS:
            if isinstance(cast := getattr(casts, operand), Cast) and gpu.lacks(cast) is None:
                both = cast.scale.block == "row" or isinstance(cast.scale.block, int)
                found |= dict.fromkeys((cast, dim) for dim in ((1, 0) if both else (1,)))
    return list(found)


def every_launch(presets: list[str]) -> Iterator[tuple[str, Launch]]:
    """What a layer of these presets launches, by name."""
    for cast, dim in casts_of(presets):
        both = cast.scale.block == "row" or isinstance(cast.scale.block, int)
        name = f"{cast}" + (f" along {('columns', 'rows')[dim]}" if both else "")
        yield name, launch_of(cast, dim)
        if not cast.scale.per_block and (target := cast.grid.gemm_dtype) is not None:
            yield f"{name}, for native GEMMs", launch_of(cast, dim, target=target)
    yield from native_launches()
    x, product = meta(*SHAPE, dtype=torch.bfloat16), meta(*SHAPE)
    yield from rotated_launches(x)
    yield "mean", launches.sums_launch(x, meta(launches.SUMS, dtype=torch.float64))
    yield "factors and bias", launches.scale_and_round_launch(product, [meta(), meta()], meta(SHAPE[1]), x)
    twice = [casts for casts in map(LinearCasts.preset, presets) if casts.traits.casts_g_twice]
    for pair in dict.fromkeys((casts.dgrad_g, casts.wgrad_g) for casts in twice):
        if gpu.covers_both(*pair) is None:
            key = meta(dtype=torch.int64)
            calls = CastCall(pair[0], 1, key, dtype=x.dtype), CastCall(pair[1], 0, key, dtype=x.dtype)
            memory = [tensor for call in calls for tensor in gpu._filled(empty_operand(x, call))]
            name = f"{pair[0]} along rows and {pair[1]} along columns"
            yield name, launches.both_launch(x, calls, meta(), memory)


def native_launches() -> Iterator[tuple[str, Launch]]:
    """What layers with native GEMMs of blocks launch."""
    for name, block in (("nvfp4", 16), ("mxfp8", 32), ("fp8-blockwise", 128)):
        casts = LinearCasts.preset(name)
        for cast in dict.fromkeys(casts.cast_of(operand) for operand in OPERANDS):
            assert cast is not None
            for dim in (1, 0):
                yield f"{cast} along {('columns', 'rows')[dim]}, for native GEMMs", layout_of(cast, block, dim)
        pair = casts.cast_of("dgrad_g"), casts.cast_of("wgrad_g")
        assert pair[0] is not None and pair[1] is not None
        yield f"{pair[0]} along rows and columns, for native GEMMs", layouts_of((pair[0], pair[1]), block)


def rotated_launches(x: Tensor) -> Iterator[tuple[str, Launch]]:
    """What layers with Hadamard transforms launch."""
    blocks = [(cast, dim) for cast, dim in casts_of(["nvfp4-nvidia"]) if cast.scale.block == 16]
    yield from ((f"{cast}, dim {dim}, rotated by 16", launch_of(cast, dim, size=16)) for cast, dim in blocks)
    yield from ((f"amax rotated by 16, dim {dim}", launches.amax_launch(x, meta(), meta(16), dim)) for dim in (0, 1))
    yield "rotation by 128, dim 0", launches.rotation_launch(x, meta(128), 0, x)


def bytes_per_element(launch: Launch) -> tuple[float, float]:
    """Bytes that the kernel reads and writes per element, and the least."""
    sizes = {
        name: tensor.nbytes / ELEMENTS
        for name, tensor in launch.arguments.items()
        if isinstance(tensor, Tensor) and tensor.numel() > ELEMENTS // 64
    }
    least = round(sum(sizes.values()), 2)
    return least + (sizes["x"] if launch.kernel == "cast_rows" else 0), least


def compile_for(launch: Launch, arch: int) -> Any:
    """Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = gpu._kernels()[0]
    constants, signature, attributes = gpu.compiled_for(launch, arch), {}, {}
    kernel = getattr(kernels, launch.kernel)
    parameters = inspect.signature(kernel.fn).parameters
    for position, name in enumerate(kernel.arg_names):
        value = launch.arguments.get(name, parameters[name].default)
        if name in constants:
            signature[name] = "constexpr"
        elif value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = _NAMES[value.dtype] if isinstance(value, Tensor) else "i32"
            if (value if isinstance(value, int) else 0 if value.is_meta else value.data_ptr()) % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()}, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=gpu.options_of(launch))


def resources_of(launch: Launch, arch: int) -> Code:
    """Compiles a kernel, and tells what it needs."""
    usage = dict(
        re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", _tool("cuobjdump", "--dump-resource-usage", launch, arch))
    )
    return Code(int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"]), int(usage["SHARED"]))


def code_of(launch: Launch, arch: int) -> Code:
    """Compiles a kernel, and counts its instructions, too."""
    # A loop takes as many elements per thread as it loads; code without loops has a tile.
    width, instructions, half_rate = launch.arguments["x"].itemsize, 0.0, 0.0
    for body in _executed(_tool("nvdisasm", "-c", launch, arch)):
        loaded = sum(_loaded(name, modifiers) for name, modifiers in body) / width
        loops = launch.kernel in ("cast_rows", "measure") and "ROTATION" not in launch.constants  # which loads signs
        elements = loaded if loops else _tile_elements(launch) / (32 * launch.warps)
        instructions += len(body) / elements
        half_rate += sum(_HALF_RATE.match(name) is not None for name, _ in body) / elements
    return resources_of(launch, arch)._replace(instructions=instructions, half_rate=half_rate)


def _tool(name: str, option: str, launch: Launch, arch: int) -> str:
    """What one of CUDA's tools, which come with Triton, prints of a compiled kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compile_for(launch, arch).asm["cubin"])
        command = [getattr(knobs.nvidia, name).path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _tile_elements(launch: Launch) -> int:
    if "TILE" in launch.constants:
        rows, columns = launch.constants["TILE"]
        return rows * columns
    sides = "SIDES" if launch.kernel == "lay_out_blocks" else "PADDED"
    (k1, k2), (down, across) = launch.constants[sides], launch.constants["BLOCKS"]
    return k1 * k2 * down * across


def _loaded(name: str, modifiers: str) -> int:
    """Bytes that an instruction loads from global memory."""
    if name != "LDG":
        return 0
    wide = re.match(r"[.A-Z]*\.(128|64|U16|U8)\b", modifiers)
    return {"128": 16, "64": 8, "U16": 2, "U8": 1}[wide[1]] if wide else 4


def _executed(code: str) -> Iterator[list[tuple[str, str]]]:
    """The instructions of each loop, or without loops those up to the last store: without calls, which only divisions
    of unusual numbers take, and what leads to them."""
    found = [(match.start(), "", match[1]) for match in _LABEL.finditer(code)]
    found += [(match.start(), match[2], match[3]) for match in _LINE.finditer(code)]
    lines = [(name, rest) for _, name, rest in sorted(found)]
    labels = {rest: position for position, (name, rest) in enumerate(lines) if not name}
    loops = []
    for position, (name, rest) in enumerate(lines):
        target = re.search(r"\((\.L_x_\d+)\)", rest) if name == "BRA" else None
        if target and labels[target[1]] < position - 1:
            loops.append((labels[target[1]], position + 1))
    inner = [loop for loop in loops if any(name == "LDG" for name, _ in lines[slice(*loop)])]
    end = max(position for position, (name, _) in enumerate(lines) if name in ("STG", "ATOMG", "REDG", "RED")) + 1
    for begin, stop in inner or [(0, end)]:
        yield [line for line in _without_calls(lines[begin:stop]) if line[0] not in ("", "NOP")]


def _without_calls(lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
    kept: list[tuple[str, str]] = []
    block: list[tuple[str, str]] = []
    for line in [*lines, ("", "")]:
        block.append(line)
        if line[0] in ("", "BRA", "BSYNC"):  # the ends of a basic block
            kept += [] if any(name == "CALL" for name, _ in block) else block
            block = []
    return kept


def least_seconds(launch: Launch, card: Gpu) -> float:
    """The largest of the bounds of a kernel's time, per element."""
    code = code_of(launch, card.arch)
    return max(card.limits(bytes_per_element(launch)[0], code.instructions, code.half_rate).values())


def report(presets: list[str], architectures: list[int]) -> list[dict[str, Any]]:
    """One entry per kernel and architecture."""
    entries = []
    for name, launch in every_launch(presets):
        moved, least = bytes_per_element(launch)
        for arch in architectures:
            code = code_of(launch, arch)
            entry = {"cast": name, "kernel": launch.kernel, "arch": f"sm_{arch}", **code._asdict()}
            entry |= {"bytes": moved, "least_bytes": least, "predicted": {}}
            for card in GPUS:
                if card.arch == arch:
                    limits = card.limits(moved, code.instructions, code.half_rate)
                    limit = max(limits, key=limits.__getitem__)
                    entry["predicted"] = {
                        "gpu": card.name,
                        "microseconds": limits[limit] * ELEMENTS * 1e6,
                        "limit": limit,
                    }
            entries.append(entry)
    return entries


def show(entries: list[dict[str, Any]]) -> None:
    """The table, in Markdown."""
    print(f"A matrix of {SHAPE[0]} x {SHAPE[1]} in bfloat16. Times are predicted, none is measured.\n")
    print(
        "| cast | architecture | registers | spilled | shared | bytes (least) | instructions | half rate | predicted |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for entry in entries:
        bound = entry["predicted"]
        time = f"{bound['gpu']}: {bound['microseconds']:.0f} us ({bound['limit']})" if bound else ""
        numbers = f"{entry['registers']} | {entry['spilled']} | {entry['shared']}"
        moved = f"{entry['bytes']} ({entry['least_bytes']}) | {entry['instructions']:.1f} | {entry['half_rate']:.1f}"
        print(f"| {entry['cast']} | {entry['arch']} | {numbers} | {moved} | {time} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--presets", nargs="+", default=[name for name in PRESETS if name != "bf16"])
    parser.add_argument("--json", type=Path, help="a file for the entries")
    options = parser.parse_args()
    entries = report(options.presets, options.arch)
    show(entries)
    if options.json:
        options.json.write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
