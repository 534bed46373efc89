"""The hardware and the settings of an estimate: data sheets, data of a step, layout over devices, assumed speeds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_lowbit.checks import choose, fraction, integer
from lightning_lowbit.data_sheets import PEAKS

if TYPE_CHECKING:
    from lightning_lowbit.nn.casts import LinearCasts  # imports torch


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
    """Makes a device from GB, TFLOP/s, and GB/s in one direction; ``PEAKS`` has the peaks of its GEMMs."""
    peaks = {_KINDS[dtype]: peak for dtype, peak in PEAKS[chip].items()} | {"fp32": fp32 * 1e12}
    if "fp4" in peaks:
        peaks["mxfp8"] = peaks["fp8"]
    elif chip[0] == "H":  # Hopper has blocks of 128, Blackwell of 32, Ada none
        peaks["fp8-blockwise"] = peaks["fp8"]
    return Device(memory * 1e9, peaks, link * 1e9, network * 1e9)


_KINDS = {"bfloat16": "bf16", "float8": "fp8", "int8": "int8", "float4": "fp4"}

# NVIDIA's data sheets: SXM modules, and PCIe cards. The link is half of the printed NVLink bandwidth, which adds up
# both directions, or PCIe in 16 lanes (8 of L4). A GPU of an SXM node has a network card of 200 (DGX A100) or
# 400 Gbit/s; PCIe cards come without one, and 0 asks for --network.
DEVICES = {
    "a100": _device("A100", 80, 19.5, 300, 25),
    "h100": _device("H100", 80, 67, 450, 50),
    "h200": _device("H200", 141, 67, 450, 50),
    "b200": _device("B200", 180, 80, 900, 50),
    "l4": _device("L4", 24, 30.3, 16, 0),
    "l40s": _device("L40S", 48, 91.6, 32, 0),
    "rtx4090": _device("RTX 4090", 24, 82.6, 32, 0),
    "rtx6000-ada": _device("RTX 6000 Ada", 48, 91.1, 32, 0),
    "rtx5090": _device("RTX 5090", 32, 104.8, 64, 0),
    "rtxpro6000": _device("RTX PRO 6000 Blackwell", 96, 125, 64, 0),
}

# Elements and scales (format, block) of block-scaled tensor cores: NVFP4 and MXFP4, MXFP8 and MXFP6.
_BLOCK_SCALED = {
    "fp4": ({"e2m1"}, {("e4m3", 16), ("e8m0", 32)}),
    "mxfp8": ({"e4m3", "e5m2", "e3m2", "e2m3"}, {("e8m0", 32)}),
}


def arithmetic(casts: "LinearCasts", gemm: str, high: str = "bf16") -> str:
    """Returns the arithmetic of a GEMM, a key of :attr:`Device.peaks`; ``high`` if no hardware multiplies its casts."""
    if gemm not in casts.quantized_gemms:
        return high
    if (kind := casts.native_gemms.get(gemm)) in ("fp8", "int8", "fp8-blockwise"):
        return kind
    operands = [cast for name in casts.operands_of(gemm) if (cast := casts.cast_of(name)) is not None]
    used = [cast.scale for cast in operands]
    formats = {(s.format, s.block[-1] if isinstance(s.block, tuple) else s.block) for s in used}
    for kind, (elements, scales) in _BLOCK_SCALED.items():
        if {cast.element for cast in operands} <= elements and len(formats) == 1 and formats <= scales:
            return kind
    return high


STRATEGIES = ("ddp", "fsdp")
GATHERS = ("stored", "bf16", "casts", "casts+bf16")


@dataclass(frozen=True)
class Batch:
    """The data of a step on a device: micro-batches of ``sequences`` sequences of ``length`` tokens."""

    sequences: int
    length: int
    micro_batches: int = 1

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


@dataclass(frozen=True)
class Layout:
    """The layout of a model over devices; raises a ``ValueError`` if the attributes contradict each other.

    FSDP gathers parameters ``"stored"`` (in their dtype) or in ``"bf16"``. With ``"casts"`` it gathers quantized
    matrices where possible, other parameters as stored; with ``"casts+bf16"`` others in bf16.
    """

    devices: int = 1
    strategy: str = "ddp"  # or "fsdp": FSDP2 with one unit per decoder block and one for the rest
    tensor_parallel: int = 1  # devices that share a block's matrices
    gather: str = "stored"
    per_node: int = 8

    def __post_init__(self) -> None:
        choose("strategy", self.strategy, STRATEGIES)
        choose("--gather", self.gather, GATHERS)
        for name in ("devices", "tensor_parallel", "per_node"):
            integer(f"--{name}", getattr(self, name), 1)
        if self.devices % (t := self.tensor_parallel):
            raise ValueError(
                f"{self.devices} devices do not divide into groups of {t}: give another --tensor_parallel."
            )
        if self.strategy == "ddp" and self.tensor_parallel > 1:
            raise ValueError("Tensor parallelism comes with ModelParallelStrategy: give --strategy fsdp.")
        if self.strategy == "ddp" and self.gather != "stored":
            raise ValueError(f"--gather {self.gather} is what FSDP gathers, and DDP gathers nothing: leave it out.")

    @property
    def data_parallel(self) -> int:
        return self.devices // self.tensor_parallel

    @property
    def shards(self) -> int:
        return self.data_parallel if self.strategy == "fsdp" else 1


@dataclass(frozen=True)
class Assumptions:
    """Shares of the peaks that GEMMs and links reach, and seconds that a host takes for an operation of a layer.

    The slow host of an H200 took 2.0 to 2.4 ms for the 22 operations of a layer in NVFP4 (docs/results/gpu.md).
    """

    utilization: float = 0.4
    link_utilization: float = 0.7
    launch: float = 5e-5

    def __post_init__(self) -> None:
        for name in ("utilization", "link_utilization"):
            fraction(f"--{name}", getattr(self, name), "a share of the peak")
