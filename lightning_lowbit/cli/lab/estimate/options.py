"""The options of ``lowbit estimate``, read without torch, and what they say: data sheets of devices, data of a step,
layout over devices, assumed speeds."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_lowbit.checks import choose, fraction, integer
from lightning_lowbit.cli.options import Parser, check_run, refuse_unknown
from lightning_lowbit.data_sheets import PEAKS

_EXAMPLES = {"peak": "bf16=989,fp8=1979, in TFLOP/s", "launch": "50, in microseconds"}
_SIZE = "80, in GB or GB/s"


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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options, with ``sheet`` (of the device), ``assumed``, and those of ``lowbit fit`` in ``rest``."""
    parser = Parser(
        "lowbit estimate",
        "--config quickstart --device h100",
        description="Estimates memory and time of a training step from formulas. Other arguments are those of `lowbit "
        "fit`: --config RECIPE [--config OVERLAY ...] [--any.argument VALUE ...].",
    )
    add = parser.add_argument
    add(
        "--device",
        default="h100",
        metavar="NAME",
        help=f"{', '.join(DEVICES)}; h100 by default. Of others: --peak, --memory, --link, --network",
    )
    add("--devices", type=int, help="how many, of all nodes; those of the configuration by default")
    add("--per_node", type=int, default=8, help="devices of a node; 8 by default")
    add("--strategy", metavar="NAME", help=f"{' or '.join(STRATEGIES)}; that of the configuration by default")
    add("--tensor_parallel", type=int, metavar="T", help="devices that share the matrices of a block")
    gather = (
        f"what FSDP gathers, one of {', '.join(GATHERS)}: parameters as they are, or in bf16; or matrices as their "
        "casts quantize them, where these allow it, and the rest as it is, or in bf16. By default that of the "
        "configuration: the plugin's quantize_before_gather is casts, the model's gather_dtype bf16"
    )
    add("--gather", metavar="WHAT", help=gather)
    add("--batch_size", type=int, help="sequences of a micro-batch on a device; the data module's by default")
    add("--sequence_length", type=int, help="tokens of a sequence; the data module's by default")
    add("--utilization", type=float, default=0.4, help="share of their peak that GEMMs are taken to reach; 0.4")
    add("--link_utilization", type=float, default=0.7, help="likewise of links; 0.7")
    launch = "microseconds that a host takes for an operation of a layer; 50, as measured on a slow host"
    add("--launch", metavar="US", default="50", help=launch)
    add("--peak", metavar="KIND=TFLOPS,...", default="", help="other peaks, dense: bf16=989,fp8=1979,fp4=9000")
    add("--memory", metavar="GB", help="GB of a device, instead of the table's")
    add("--link", metavar="GB/s", help="GB/s that a device sends within its node, instead of the table's")
    add("--network", metavar="GB/s", help="GB/s that a device sends to other nodes, instead of the table's")
    add("--json", action="store_true", help="prints bytes, FLOPs and seconds for programs")
    options, rest = parser.parse_known_args(arguments)
    refuse_unknown(rest, parser)
    check_run("fit", rest, shown="estimate")
    options.sheet, options.rest = _changed(options), rest
    seconds = _positive("launch", options.launch) / 1e6
    options.assumed = Assumptions(options.utilization, options.link_utilization, seconds)
    return options


def _changed(options: argparse.Namespace) -> Device:
    try:
        device = DEVICES[choose("--device", options.device, DEVICES)]
    except ValueError as error:
        sheet = "--peak bf16=165,fp8=330 --memory 24 --link 32"
        raise ValueError(f"{error} For another device, name the nearest one, and give its figures: {sheet}.") from None
    kinds = sorted({kind for known in DEVICES.values() for kind in known.peaks})
    peaks = dict(device.peaks)
    for item in filter(None, options.peak.split(",")):
        kind, sign, peak = item.partition("=")
        if not sign:
            raise ValueError(f"--peak takes arithmetics and their TFLOP/s, such as bf16=989,fp8=1979; got {item!r}.")
        peaks[choose("arithmetic in --peak", kind.strip(), kinds)] = _positive("peak", peak) * 1e12
    sizes = {name: getattr(options, name) for name in ("memory", "link", "network")}
    changes = {name: _positive(name, size) * 1e9 for name, size in sizes.items() if size is not None}
    return replace(device, peaks=peaks, **changes)


def _positive(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"--{name} takes numbers above 0, such as {_EXAMPLES.get(name, _SIZE)}; got {value!r}.")
    return number
