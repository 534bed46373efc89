"""Tables of a model's layers and their casts. Layers whose names differ only in numbers share a row."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_lowbit._torch import is_compiled
from lightning_lowbit.distributed import whole_shape
from lightning_lowbit.nn import OPERANDS, LinearCasts, QuantizedLayer
from lightning_lowbit.nn.layers.composite import PartLayer
from lightning_lowbit.nn.layers.layer import quantized_layers
from lightning_lowbit.nn.layers.speed import Speed, cpu_speed
from lightning_lowbit.nn.native.devices import slower_because
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.report.blocks import Table, Text
from lightning_lowbit.report.formatting import name_range, without_numbers

WIDE = 2**24  # weights of a layer, of 4096 x 4096: from there on an H200 computed for longer than its host took


def layers_and_casts(model: nn.Module, dtype: torch.dtype) -> list[Table | Text]:
    """Returns the tables of layers and of casts, why GEMMs are emulated, and whether Python limits them, for a compute
    dtype."""
    return [layer_table(model, dtype), *_cast_legend(model), *native_notes(model, dtype), *host_notes(model)]


def layer_table(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Table:
    """Tabulates the kinds of layers; ``dtype`` is the compute dtype."""
    rows: dict[tuple[Any, ...], list[str]] = {}
    parameters: Counter[tuple[Any, ...]] = Counter()
    labels = _labels(model)
    counted: set[nn.Parameter] = set()  # tied parameters belong to several modules
    shared = {p for m in model.modules() if isinstance(m, PartLayer) for p in m.own_parameters()}  # with a host
    for name, module in model.named_modules():
        name = clean_name(name)
        if isinstance(module, QuantizedLayer):
            size, casts, where = module.size_text, labels[module.full_casts], _executed(module, dtype)
            members = set(module.own_parameters())
        elif members := set(module.parameters(recurse=False)) - shared:
            size, casts, where = "", "high precision", ""
        else:
            continue
        key = (without_numbers(name), type(module).__name__, size, casts, where)
        rows.setdefault(key, []).append(name)
        parameters[key] += sum(whole_shape(p).numel() for p in members - counted if not is_lazy(p))
        counted |= members
    body = [
        [name_range(names), kind, size, _count(parameters[key]), casts, where]
        for key, names in rows.items()
        for _, kind, size, casts, where in [key]
    ]
    quantized = sum(count for key, count in parameters.items() if key[3] != "high precision")
    total = sum(parameters.values())
    share = f"{quantized / total:.1%}" if total else "none"
    caption = f"{_count(quantized)} of {_count(total)} parameters ({share}) are weights and biases of converted layers."
    caption += _savings(model, dtype)
    return Table(["layers", "class", "in → out", "parameters", "casts", "GEMMs"], body, caption)


def _savings(model: nn.Module, dtype: torch.dtype) -> str:
    """Says how many bits of their inputs layers keep, if not the tensors."""
    layers = [layer for layer in quantized_layers(model).values() if layer.lowbit.save == "codes"]
    layers = [layer for layer in layers if layer.weight is not None]
    if not layers:
        return ""
    inputs = [layer.saved_input(dtype) for layer in layers]
    bits = sum(width * bits for width, bits in inputs) / max(sum(width for width, _ in inputs), 1)
    whole = torch.finfo(dtype).bits
    return f" For the backward pass they keep {bits:.2f} bits per element of their inputs, of {whole} (save='codes')."


def _executed(layer: QuantizedLayer, dtype: torch.dtype) -> str:
    casts, quantized = layer.full_casts, layer.full_casts.quantized_gemms
    native = layer.native_gemms(layer.device, casts, dtype)
    if not quantized or not native:
        return "emulated" if quantized else ""
    rest = [gemm for gemm in quantized if gemm not in native]
    return f"native {', '.join(native)}; emulated {', '.join(rest)}" if rest else "native"


def native_notes(model: nn.Module, dtype: torch.dtype) -> list[Text]:
    """Explains why GEMMs of two quantized operands are emulated in a compute dtype, a line for each reason."""
    labels, notes = _labels(model), dict[str, None]()
    for layer in quantized_layers(model).values():
        for gemm, reason in layer.emulated_because(layer.device, dtype).items():
            notes[f"Emulated, {gemm} of {labels[layer.full_casts]}: {reason}."] = None
    return [Text(note) for note in notes]


def host_notes(model: nn.Module, kind: str = "cuda") -> list[Text]:
    """Says that small layers on devices of a kind wait for Python, where nothing is compiled."""
    layers = [layer for layer in quantized_layers(model).values() if layer.weight is not None]
    sizes = [whole_shape(layer.weight).numel() for layer in layers if layer.device.type == kind]
    mean = sum(sizes) // max(len(sizes), 1)
    if not 0 < mean < WIDE or any(map(is_compiled, model.modules())):
        return []
    text = f"On a GPU layers of {_count(mean)} weights, as here on average, wait for Python; on an H200 those of "
    text += f"{_count(WIDE)} did not. In CUDA graphs nothing waits: network.compile(mode='reduce-overhead')."
    return [Text(text)]


def speed_on_cpu(model: nn.Module, dtype: torch.dtype) -> Speed | None:
    """Returns the speed of this CPU's GEMMs of codes, which layers take in a compute dtype or leave out as slower ones;
    None for a model that could not take them."""
    layers = quantized_layers(model).values()
    if any("cpu" in layer.native_kinds(layer.device, layer.full_casts, dtype).values() for layer in layers):
        return cpu_speed(dtype)
    slower = slower_because("cpu")
    is_left_out = any(slower in layer.emulated_because(layer.device, dtype).values() for layer in layers)
    return cpu_speed(dtype, is_native=False) if is_left_out else None


def _cast_legend(model: nn.Module) -> list[Table]:
    labels = _labels(model)
    shown = [_describe(casts) for casts in labels]
    names = dict.fromkeys(name for casts in shown for name in casts)
    rows = [[name, *(casts.get(name, "") for casts in shown)] for name in names]
    return [Table(["operand", *labels.values()], rows)] if labels else []


def _describe(casts: LinearCasts) -> dict[str, str]:
    beside = {
        "hadamard": ", ".join(f"{gemm} {transform}" for gemm, transform in casts.hadamard.items()),
        "subtract_mean": ", ".join(casts.subtract_mean),
        "surrogate": ", ".join(f"{operand} {kind}" for operand, kind in casts.surrogate.items()),
        "smooth": casts.smooth or "",
        "requantize": ", ".join(casts.requantize),
    }
    operands = {operand: str(casts.cast_of(operand) or "hp") for operand in OPERANDS}
    return operands | {name: text for name, text in beside.items() if text}


def _labels(model: nn.Module) -> dict[LinearCasts, str]:
    distinct = dict.fromkeys(layer.full_casts for layer in quantized_layers(model).values())
    names = {casts: str(casts) for casts in distinct}
    return {casts: f"casts {i}" if " " in name else name for i, (casts, name) in enumerate(names.items(), start=1)}


def layer_data(model: nn.Module, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    for name, layer in quantized_layers(model).items():
        rows, columns = (None, None) if layer.weight is None else layer.matrix_shape[-2:]  # None: activations
        yield {
            "name": clean_name(name),
            "in": columns,
            "out": rows,
            "casts": _describe(layer.full_casts),
            "native": list(layer.native_gemms(layer.device, layer.full_casts, dtype)),
            "saved_bits": layer.saved_input(dtype)[1],
        }


def merge_numbers(flops: Mapping[str, int], reasons: Mapping[str, str]) -> list[tuple[str, int, int, str]]:
    """Merges entries of one reason whose names differ only in numbers: (names, count, FLOPs, reason), largest first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in flops:
        groups.setdefault((without_numbers(name), reasons[name]), []).append(name)
    merged = [
        (name_range(names) or "(outside any module)", len(names), sum(flops[n] for n in names), why)
        for (_, why), names in groups.items()
    ]
    return sorted(merged, key=lambda row: -row[2])


def _count(number: int) -> str:
    return _scaled(number, {"B": 1e9, "M": 1e6, "k": 1e3}, "")


def flops_text(number: int) -> str:
    return _scaled(number, {"PFLOPs": 1e15, "TFLOPs": 1e12, "GFLOPs": 1e9, "MFLOPs": 1e6}, " FLOPs")


def _scaled(number: int, units: Mapping[str, float], unit: str) -> str:
    return next((f"{number / size:.2f} {name}" for name, size in units.items() if number >= size), f"{number}{unit}")
