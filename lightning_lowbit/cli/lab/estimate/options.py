"""The options of ``lowbit estimate``, read without torch."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from lightning_lowbit.checks import choose
from lightning_lowbit.cli.lab.estimate.devices import DEVICES, GATHERS, STRATEGIES, Assumptions, Device
from lightning_lowbit.cli.options import check_run, refuse_unknown
from lightning_lowbit.cli.parser import Parser

_EXAMPLES = {"peak": "bf16=989,fp8=1979, in TFLOP/s", "launch": "50, in microseconds"}
_SIZE = "80, in GB or GB/s"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options, with ``sheet`` (of the device), ``assumed``, and those of ``lowbit fit`` in ``rest``."""
    options, rest = _parser().parse_known_args(arguments)
    refuse_unknown(rest, _parser())
    check_run("fit", rest, shown="estimate")
    options.sheet, options.rest = _device(options), rest
    launch = _positive("launch", options.launch) / 1e6
    options.assumed = Assumptions(options.utilization, options.link_utilization, launch)
    return options


def _parser() -> argparse.ArgumentParser:
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
    return parser


def _device(options: argparse.Namespace) -> Device:
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
