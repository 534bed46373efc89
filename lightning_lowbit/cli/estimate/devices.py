"""Data sheets of devices: memory, peak FLOP/s and bandwidth."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_lowbit.metrics.devices import PEAKS
from lightning_lowbit.nn.casts.linear_casts import LinearCasts


@dataclass(frozen=True)
class Device:
    """The data sheet of a device: memory in bytes; ``link`` (within a node) and ``network`` (between nodes) in bytes/s.

    ``peaks`` are dense FLOP/s by arithmetic: ``"fp32"``, ``"bf16"``, ``"int8"``, ``"fp8"`` (scales of tensors or rows),
    ``"fp8-blockwise"`` and ``"mxfp8"`` (scales of blocks) and ``"fp4"``.
    """

    memory: float
    peaks: Mapping[str, float]
    link: float
    network: float


def _device(chip: str, memory: float, fp32: float, link: float, network: float) -> Device:
    """A device from GB, TFLOP/s, and GB/s in one direction; the peaks of GEMMs are those of ``PEAKS``."""
    peaks = {_KINDS[dtype]: peak for dtype, peak in PEAKS[chip].items()} | {"fp32": fp32 * 1e12}
    if "fp4" in peaks:
        peaks["mxfp8"] = peaks["fp8"]
    elif "fp8" in peaks:  # Hopper has blocks of 128, Blackwell of 32
        peaks["fp8-blockwise"] = peaks["fp8"]
    return Device(memory * 1e9, peaks, link * 1e9, network * 1e9)


_KINDS = {"bfloat16": "bf16", "float8": "fp8", "int8": "int8", "float4": "fp4"}

# NVIDIA's data sheets of the SXM modules. The link is half of the printed NVLink bandwidth, which adds up both
# directions. Each GPU has a network card of 200 (DGX A100) or 400 Gbit/s.
DEVICES = {
    "a100": _device("A100", 80, 19.5, 300, 25),
    "h100": _device("H100", 80, 67, 450, 50),
    "h200": _device("H200", 141, 67, 450, 50),
    "b200": _device("B200", 180, 80, 900, 50),
}

# Elements and scales (format, block) of block-scaled tensor cores: NVFP4 and MXFP4, MXFP8 and MXFP6.
_BLOCK_SCALED = {
    "fp4": ({"e2m1"}, {("e4m3", 16), ("e8m0", 32)}),
    "mxfp8": ({"e4m3", "e5m2", "e3m2", "e2m3"}, {("e8m0", 32)}),
}


def arithmetic(casts: LinearCasts, gemm: str, high: str = "bf16") -> str:
    """The arithmetic of a GEMM, a key of :attr:`Device.peaks`; ``high`` if no hardware multiplies its casts."""
    if gemm not in casts.quantized_gemms:
        return high
    if (kind := casts.native_gemms.get(gemm)) in ("fp8", "int8", "fp8-blockwise"):
        return kind
    given = [cast for operand in casts.operands_of(gemm) if (cast := casts.cast_of(operand)) is not None]
    for kind, (elements, scales) in _BLOCK_SCALED.items():
        blocks = [cast.scale.block[-1] if isinstance(cast.scale.block, tuple) else cast.scale.block for cast in given]
        found = {(cast.scale.format, block) for cast, block in zip(given, blocks, strict=True)}
        if {cast.element for cast in given} <= elements and len(found) == 1 and found <= scales:
            return kind
    return high
