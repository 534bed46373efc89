"""The command ``lowbit estimate`` computes memory and time of a training step, of a model on the meta device."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lightning_lowbit.checks import choose
from lightning_lowbit.cli.lab.estimate.devices import DEVICES, GATHERS, STRATEGIES, Assumptions, Batch, Device, Layout
from lightning_lowbit.cli.lab.estimate.formulas import Collective, StepTime, communication, flops, memory, times
from lightning_lowbit.cli.lab.estimate.shapes import Model, describe
from lightning_lowbit.cli.run import make_on_meta
from lightning_lowbit.precision import LowBitPrecision

_GIB = 2**30

_LEFT_OUT = (
    "Not in it: the device's context, the allocator's gaps, workspaces of kernels and of quantization, everything that "
    "is no GEMM (norms, casts, the optimizer, loading), and latencies."
)


def estimate(arguments: Sequence[str]) -> None:
    options, rest = _parser().parse_known_args(arguments)
    parts = make_on_meta(["fit", *rest])
    trainer = parts.config["fit"].trainer
    plugin = next((plugin for plugin in parts.plugins if isinstance(plugin, LowBitPrecision)), None)
    casts = "casts" if plugin is not None and plugin.quantize_before_gather else None
    gathers = (casts, getattr(parts.model, "gather_dtype", None))
    layout, device = _layout(options, trainer, "+".join(filter(None, gathers)) or "stored"), _device(options)
    assumed = Assumptions(options.utilization, options.link_utilization)
    batch = _batch(options, parts.datamodule, trainer)
    model, notes = describe(parts.model, plugin, str(trainer.precision or "32-true"), trainer)
    memories = memory(model, batch, layout)
    counted, traffic = flops(model, batch, layout), communication(model, batch, layout)
    spent = times(model, batch, layout, device, assumed)
    notes += _device_notes(counted, device, options.device, model.high)
    if options.json:
        numbers = {
            "parameters": model.parameters,
            "batch": asdict(batch),
            "layout": asdict(layout),
            "assumed": asdict(assumed),
            "memory_bytes": memories,
            "flops": counted,
            "communication": [{**asdict(collective), "sent": collective.sent} for collective in traffic],
            "seconds": {**asdict(spent), "hidden": spent.hidden, "exposed": spent.exposed},
            "notes": notes,
        }
        print(json.dumps(numbers, indent=2))
        return
    lines = [*_head(model, batch, layout), *_memory_table(memories, device, options.device)]
    lines += _work_table(counted, traffic, spent)
    lines += [_step_line(batch, layout, spent), "", *_closing(assumed, options.device, notes)]
    print("\n".join(lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lowbit estimate",
        description="Estimates memory and time of a training step from formulas. Other arguments are those of `lowbit "
        "fit`: --config RECIPE [--config OVERLAY ...] [--any.argument VALUE ...].",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--device", default="h100", metavar="NAME", help=f"{', '.join(DEVICES)}; h100 by default")
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
    add("--peak", metavar="KIND=TFLOPS,...", default="", help="other peaks, dense: bf16=989,fp8=1979,fp4=9000")
    add("--memory", metavar="GB", help="GB of a device, instead of the table's")
    add("--link", metavar="GB/s", help="GB/s that a device sends within its node, instead of the table's")
    add("--network", metavar="GB/s", help="GB/s that a device sends to other nodes, instead of the table's")
    add("--json", action="store_true", help="prints bytes, FLOPs and seconds for programs")
    return parser


def _device(options: argparse.Namespace) -> Device:
    device = DEVICES[choose("--device", options.device, DEVICES)]
    kinds = sorted({kind for known in DEVICES.values() for kind in known.peaks})
    peaks = dict(device.peaks)
    for item in filter(None, options.peak.split(",")):
        kind, _, peak = item.partition("=")
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
        example = "bf16=989,fp8=1979, in TFLOP/s" if name == "peak" else "80, in GB or GB/s"
        raise ValueError(f"--{name} takes numbers above 0, such as {example}; got {value!r}.")
    return number


def _layout(options: argparse.Namespace, trainer: Any, gathered: str) -> Layout:
    named, per_node = trainer.strategy, _devices_of_a_node(trainer.devices)
    devices = options.devices
    if devices is None:
        if per_node is None:
            raise ValueError(f"trainer.devices is {trainer.devices!r}, which only a machine can tell: give --devices.")
        devices = per_node * trainer.num_nodes
    arguments = getattr(named, "init_args", None) or {}
    name = named if isinstance(named, str) else str(getattr(named, "class_path", "auto")).rpartition(".")[2]
    strategy = options.strategy
    if strategy is None:
        kinds = {"ModelParallelStrategy": "fsdp", "FSDPStrategy": "fsdp", "DDPStrategy": "ddp", "auto": "ddp"}
        strategy = kinds.get(name) or next((kind for kind in STRATEGIES if name.startswith(kind)), None)
    if strategy is None:
        raise ValueError(f"How {name} spreads a model is not known here: say --strategy ddp or --strategy fsdp.")
    tensor_parallel = options.tensor_parallel
    if tensor_parallel is None:
        tensor_parallel = 1
        if name == "ModelParallelStrategy" and strategy == "fsdp":
            size = arguments.get("tensor_parallel_size", "auto")
            tensor_parallel = min(per_node or options.per_node, devices) if size == "auto" else int(size)
    gather = options.gather or (gathered if strategy == "fsdp" else "stored")
    return Layout(devices, strategy, tensor_parallel, gather, options.per_node)


def _devices_of_a_node(devices: Any) -> int | None:
    """Reads the number in ``trainer.devices``; None for all devices of a machine."""
    if isinstance(devices, str):
        devices = int(devices) if devices.isdigit() else [part for part in devices.split(",") if part]
        if devices == ["auto"]:
            return None
    count = len(devices) if isinstance(devices, list) else devices
    return count if isinstance(count, int) and count > 0 else None


def _batch(options: argparse.Namespace, data: Any, trainer: Any) -> Batch:
    sizes = {}
    for name in ("batch_size", "sequence_length"):
        size = getattr(options, name) if getattr(options, name) is not None else getattr(data, name, None)
        if not isinstance(size, int) or size < 1:
            owner = type(data).__name__ if data is not None else "the configuration, which names no data,"
            raise ValueError(f"{owner} tells no {name} of 1 or more (got {size!r}): give --{name}.")
        sizes[name] = size
    return Batch(sizes["batch_size"], sizes["sequence_length"], trainer.accumulate_grad_batches or 1)


def _head(model: Model, batch: Batch, layout: Layout) -> list[str]:
    spread = f"{layout.data_parallel} data-parallel ({layout.strategy}) x {layout.tensor_parallel} tensor-parallel"
    tokens = batch.tokens * batch.micro_batches * layout.data_parallel
    again = ", activations computed again" if model.checkpointing else ""
    return [
        f"{model.parameters:,} parameters in {len(model.weights)} tensors, {len(model.layers)} linear layers{again}",
        f"{layout.devices:,} devices: {spread}" if layout.devices > 1 else "1 device",
        f"{tokens:,} tokens a step: {batch.sequences} sequences of {batch.length} a device and micro-batch, "
        f"{batch.micro_batches} of these a step",
        "",
    ]


def _memory_table(memories: Mapping[str, int], device: Device, name: str) -> list[str]:
    total = sum(memories.values())
    rows = [f"  {purpose:<26}{size / _GIB:>12.3f} GiB" for purpose, size in memories.items()]
    verdict = "fits" if total <= device.memory else "does NOT fit"
    last = f"  {'sum':<26}{total / _GIB:>12.3f} GiB of {device.memory / _GIB:.1f}: {verdict} on {name}"
    return ["Memory of a device", *rows, last, ""]


def _work_table(counted: Mapping[str, int], traffic: Sequence[Collective], spent: StepTime) -> list[str]:
    rows = [f"  {f'FLOPs, {kind}':<26}{count / 1e12:>12.3f} TFLOP" for kind, count in counted.items()]
    for collective in traffic:
        label, payload = f"{collective.name} of {collective.of}", collective.payload / 1e9
        rows.append(f"  {label:<30}{payload:>8.3f} GB, of which a device sends {collective.sent / 1e9:.3f}")
    waits = {"tensor parallelism": spent.tensor_parallel, "data parallelism": spent.data_parallel}
    seconds = {**spent.gemms, **{kind: value for kind, value in waits.items() if value}}
    rows += [f"  {f'time of {kind}':<26}{value * 1e3:>12.1f} ms" for kind, value in seconds.items()]
    return ["Work of a device in a step", *rows, ""]


def _step_line(batch: Batch, layout: Layout, spent: StepTime) -> str:
    tokens = batch.tokens * batch.micro_batches * layout.data_parallel
    rates = [f"{seconds * 1e3:,.1f} ms ({tokens / seconds:,.0f} tokens/s)" for seconds in (spent.hidden, spent.exposed)]
    if spent.data_parallel == 0:
        return f"A step: {rates[0]}"
    return f"A step: {rates[0]} with data-parallel communication hidden, {rates[1]} without"


def _device_notes(counted: Mapping[str, int], device: Device, name: str, high: str) -> list[str]:
    notes = []
    for kind in counted:
        if kind != "attention" and kind not in device.peaks:
            notes.append(
                f"{name} has no arithmetic for {kind}: its GEMMs are counted as {high}, without the casts' time."
            )
        elif kind in ("fp4", "mxfp8", "fp8-blockwise"):
            counted_as = f"GEMMs in {kind} are counted as tensor cores compute them"
            notes.append(
                f"{counted_as}. Where it has no native GEMM, this package emulates them, more slowly than bf16."
            )
    return notes


def _closing(assumed: Assumptions, name: str, notes: Sequence[str]) -> list[str]:
    return [
        f"An estimate from formulas and from data sheets of {name}, not a measurement: GEMMs are assumed to reach "
        f"{assumed.utilization:.0%} of the peak, links {assumed.link_utilization:.0%}.",
        *notes,
        _LEFT_OUT,
    ]
