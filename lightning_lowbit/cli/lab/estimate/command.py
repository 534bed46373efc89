"""The command ``lowbit estimate`` computes memory and time of a training step, of a model on the meta device."""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import floor, log10
from typing import Any

from lightning_lowbit.cli.lab.estimate.formulas import Collective, StepTime, communication, flops, memory, times
from lightning_lowbit.cli.lab.estimate.options import DEVICES, STRATEGIES, Assumptions, Batch, Device, Layout
from lightning_lowbit.cli.lab.estimate.shapes import Model, describe
from lightning_lowbit.cli.run import make_on_meta
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.report.blocks import Table, Text
from lightning_lowbit.report.tables import plain

_GIB = 2**30

_LEFT_OUT = (
    "Not in it: the device's context, the allocator's gaps, workspaces of kernels and of quantization, everything that "
    "is no GEMM (norms, casts, the optimizer, loading), and latencies."
)


def estimate(options: Namespace) -> None:
    device, assumed = options.sheet, options.assumed
    parts = make_on_meta(["fit", *options.rest])
    trainer = parts.config["fit"].trainer
    plugin = next((plugin for plugin in parts.plugins if isinstance(plugin, LowBitPrecision)), None)
    casts = "casts" if plugin is not None and plugin.quantize_before_gather else None
    gathers = (casts, getattr(parts.model, "gather_dtype", None))
    problems = list[str]()  # all are said at once
    layout = _layout(options, trainer, "+".join(filter(None, gathers)) or "stored", problems)
    batch = _batch(options, parts.datamodule, trainer, problems)
    if layout is None or batch is None:
        raise ValueError(" ".join(problems))
    if layout.devices > layout.per_node and not device.network:
        raise ValueError(f"{options.device} comes without a network: give --network GB/s, or fewer --devices.")
    model, notes = describe(parts.model, plugin, str(trainer.precision or "32-true"), trainer)
    memories = memory(model, batch, layout)
    counted, traffic = flops(model, batch, layout), communication(model, batch, layout)
    spent = times(model, batch, layout, device, assumed)
    sheet = DEVICES[options.device]
    name = options.device if device == sheet else f"{options.device} with your figures"
    notes += [*_device_notes(counted, device, name, model.high), *_unused(spent, device, sheet, model.high)]
    if options.json:
        numbers = {
            "parameters": model.parameters,
            "batch": asdict(batch),
            "layout": asdict(layout),
            "assumed": asdict(assumed),
            "memory_bytes": memories,
            "flops": counted,
            "communication": [{**asdict(collective), "sent": collective.sent} for collective in traffic],
            "seconds": {**asdict(spent), "hidden": spent.hidden, "exposed": spent.exposed}
            | {f"captured_{name}": getattr(spent.captured, name) for name in ("hidden", "exposed")},
            "notes": notes,
        }
        print(json.dumps(numbers, indent=2))
        return
    tables = [_memory_table(memories, device, name), _work_table(counted, traffic, spent)]
    end = [_step(model, batch, layout, spent), _closing(assumed, name, notes)]
    print(plain(Text(_head(model, batch, layout)), *tables, *map(Text, end)), end="")


def _layout(options: Namespace, trainer: Any, gathered: str, problems: list[str]) -> Layout | None:
    named, per_node = trainer.strategy, _devices_of_a_node(trainer.devices)
    devices = options.devices
    if devices is None:
        if per_node is None:
            problems.append(f"trainer.devices is {trainer.devices!r}, which only a machine can tell: give --devices.")
        devices = (per_node or 1) * trainer.num_nodes
    arguments = getattr(named, "init_args", None) or {}
    name = named if isinstance(named, str) else str(getattr(named, "class_path", "auto")).rpartition(".")[2]
    strategy = options.strategy
    if strategy is None:
        kinds = {"ModelParallelStrategy": "fsdp", "FSDPStrategy": "fsdp", "DDPStrategy": "ddp", "auto": "ddp"}
        strategy = kinds.get(name) or next((kind for kind in STRATEGIES if name.startswith(kind)), None)
    if strategy is None:
        problems.append(f"How {name} spreads a model is not known here: say --strategy ddp or --strategy fsdp.")
    if problems or strategy is None:
        return None
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


def _batch(options: Namespace, data: Any, trainer: Any, problems: list[str]) -> Batch | None:
    names = ("batch_size", "sequence_length")
    asked = {name: getattr(options, name) for name in names}
    sizes: dict[str, Any] = {name: getattr(data, name, None) if size is None else size for name, size in asked.items()}
    if missing := [name for name, size in sizes.items() if not isinstance(size, int) or size < 1]:
        owner = type(data).__name__ if data is not None else "The configuration, which names no data,"
        sayings = " and ".join(f"no {name} of 1 or more (got {sizes[name]!r})" for name in missing)
        problems.append(f"{owner} tells {sayings}: give {' and '.join(f'--{name}' for name in missing)}.")
        return None
    return Batch(sizes["batch_size"], sizes["sequence_length"], trainer.accumulate_grad_batches or 1)


def _head(model: Model, batch: Batch, layout: Layout) -> str:
    spread = f"{layout.data_parallel} data-parallel ({layout.strategy}) x {layout.tensor_parallel} tensor-parallel"
    tokens = batch.tokens * batch.micro_batches * layout.data_parallel
    again = ", activations computed again" if model.checkpointing else ""
    devices = f"{layout.devices:,} devices: {spread}" if layout.devices > 1 else "1 device"
    return (
        f"{model.parameters:,} parameters in {len(model.weights)} tensors, {len(model.layers)} linear layers{again}\n"
        f"{devices}\n{tokens:,} tokens a step: {batch.sequences} sequences of {batch.length} a device and micro-batch, "
        f"{batch.micro_batches} of these a step"
    )


def _memory_table(memories: Mapping[str, int], device: Device, name: str) -> Table:
    total = sum(memories.values())
    rows = [[purpose, f"{size / _GIB:12.3f} GiB"] for purpose, size in [*memories.items(), ("sum", total)]]
    verdict = "fits" if total <= device.memory else "does NOT fit"
    return Table(["memory of a device", ""], rows, f"Of {device.memory / _GIB:.1f} GiB: {verdict} on {name}.")


def _work_table(counted: Mapping[str, int], traffic: Sequence[Collective], spent: StepTime) -> Table:
    rows = [[f"FLOPs, {kind}", f"{count / 1e12:12.3f} TFLOP"] for kind, count in counted.items()]
    for collective in traffic:
        sent = f"{collective.payload / 1e9:12.3f} GB, of which a device sends {collective.sent / 1e9:.3f}"
        rows.append([f"{collective.name} of {collective.of}", sent])
    waits = {"tensor parallelism": spent.tensor_parallel, "data parallelism": spent.data_parallel}
    seconds = {**spent.gemms, "the host": spent.launches, **{kind: value for kind, value in waits.items() if value}}
    rows += [[f"time of {kind}", f"{_rounded(value * 1e3):>12} ms"] for kind, value in seconds.items()]
    return Table(["work of a device in a step", ""], rows)


def _rounded(number: float) -> str:
    """Writes two significant digits, which is more than the assumptions know."""
    digits = 1 - floor(log10(number)) if number > 0 else 0
    return f"{round(number, digits):,.{max(digits, 0)}f}"


def _step(model: Model, batch: Batch, layout: Layout, spent: StepTime) -> str:
    if model.convolutions:
        least = _rounded(spent.captured.hidden * 1e3)
        return f"A step: more than {least} ms, since {model.convolutions} convolutions are not counted"
    tokens = batch.tokens * batch.micro_batches * layout.data_parallel

    def rates(times: StepTime) -> str:
        both = [times.hidden, times.exposed] if times.data_parallel else [times.hidden]
        texts = [f"{_rounded(seconds * 1e3)} ms ({_rounded(tokens / seconds)} tokens/s)" for seconds in both]
        return " with data-parallel communication hidden, ".join(texts) + " without" * (len(texts) - 1)

    if spent.hidden == spent.captured.hidden:
        return f"A step: {rates(spent)}"
    fast, slow = (_rounded(times.hidden * 1e3) for times in (spent.captured, spent))
    return (
        f"A step: host-bound, {fast} to {slow} ms\n"
        f"  in a CUDA graph: {rates(spent.captured)}\n"
        f"  eager, on a host as slow as --launch says: {rates(spent)}"
    )


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


def _unused(spent: StepTime, device: Device, sheet: Device, high: str) -> list[str]:
    kinds = [kind for kind, peak in device.peaks.items() if peak != sheet.peaks.get(kind) and kind not in spent.gemms]
    return [
        f"No GEMM is counted in {kind}, so its --peak changes nothing. What is not quantized is in {high}, "
        "by compute_dtype, where 'auto' is bf16."
        for kind in kinds
    ]


def _closing(assumed: Assumptions, name: str, notes: Sequence[str]) -> str:
    about = (
        f"An estimate from formulas and from data sheets of {name}, not a measurement: GEMMs are assumed to reach "
        f"{assumed.utilization:.0%} of the peak, links {assumed.link_utilization:.0%}, and the host to take "
        f"{assumed.launch * 1e6:.3g} microseconds for an operation of a layer (50 on the slow host of an H200)."
    )
    return "\n".join([about, *notes, _LEFT_OUT])
