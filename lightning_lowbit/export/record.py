"""``lowbit.json`` in an exported folder: how each layer was trained, for ``load``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_lowbit.checks import choose, integer, number, text
from lightning_lowbit.export.folder import write_json
from lightning_lowbit.export.reading.files import AGAIN, read_json
from lightning_lowbit.export.trained_model import TrainedModel
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.precision.checkpoints.trained import primitive

NAME = "lowbit.json"
_VERSION = 1


class Record(NamedTuple):
    """The casts with which an exported model was trained."""

    format: str  # of the folder
    casts: Mapping[str, LinearCasts]  # of each layer that is quantized
    input_amaxes: Mapping[str, float]  # by layer, the amax that scales its input, with delayed scaling


def write_record(original: TrainedModel, format: str, folder: Path) -> None:
    """Writes the casts of the quantized layers by name, each once."""
    names: dict[LinearCasts, str] = {}
    layers = {name: names.setdefault(layer.full_casts, str(len(names))) for name, layer in original.layers.items()}
    casts = {name: primitive(casts) for casts, name in names.items()}
    amaxes = {
        name: float(layer.lowbit.amaxes.in_force[OPERANDS.index("fprop_x")])
        for name, layer in original.layers.items()
        if layer.lowbit.amaxes is not None and "fprop_x" in layer.full_casts.delayed
    }
    content = {"version": _VERSION, "format": format, "layers": layers, "casts": casts, "input_amaxes": amaxes}
    write_json(folder / NAME, content)


def read_record(folder: Path) -> Record | None:
    """Returns the record of an exported folder, None for folders of others; a ``ValueError`` for a damaged or later
    one."""
    path = folder / NAME
    if not path.exists():
        return None
    record = read_json(path)
    try:
        version: Any = integer("version", record.get("version"), 1)
        if version > _VERSION:
            raise ValueError(f"it has version {version}, and this lightning_lowbit reads up to {_VERSION}")
        parts: dict[str, Any] = {key: record.get(key) for key in ("casts", "layers", "input_amaxes")}
        for key, part in parts.items():
            if not isinstance(part, dict):
                raise ValueError(f"it has {key} {part!r}, no mapping")
        casts = {name: LinearCasts.of(value) for name, value in parts["casts"].items()}
        layers = {layer: casts[choose("casts", name, casts)] for layer, name in parts["layers"].items()}
        amaxes = {layer: number("input_amaxes", amax, at_least=0) for layer, amax in parts["input_amaxes"].items()}
        format: Any = text("format", record.get("format"))
    except (ValueError, TypeError) as error:  # fields of casts are of any type
        raise ValueError(f"{path} cannot be read ({error}). {AGAIN}") from error
    return Record(format, layers, amaxes)
