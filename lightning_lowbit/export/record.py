"""``lowbit.json`` in an exported folder: how each layer was trained, for :func:`load`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lightning_lowbit.checks import choose
from lightning_lowbit.export.folder import write_json
from lightning_lowbit.export.source import Source
from lightning_lowbit.nn.casts import LinearCasts
from lightning_lowbit.nn.plan import OPERANDS
from lightning_lowbit.precision.checkpoints.trained import primitive

NAME = "lowbit.json"
_VERSION = 1


class Record(NamedTuple):
    """How an exported model was trained.

    Attributes:
        format: of the folder.
        casts: of each layer that is quantized.
        input_amaxes: by layer, the amax by which the training's forward pass scales its input, with delayed scaling.
    """

    format: str
    casts: Mapping[str, LinearCasts]
    input_amaxes: Mapping[str, float]


def write_record(source: Source, format: str, folder: Path) -> None:
    """Writes the casts of the quantized layers by name, each once."""
    names: dict[LinearCasts, str] = {}
    layers = {}
    for name, layer in source.layers.items():
        layers[name] = names.setdefault(layer.full_casts, str(len(names)))
    casts = {name: primitive(each) for each, name in names.items()}
    amaxes = {
        name: float(layer.amaxes.in_force[OPERANDS.index("fprop_x")])
        for name, layer in source.layers.items()
        if layer.amaxes is not None and "fprop_x" in layer.full_casts.delayed
    }
    content = {"version": _VERSION, "format": format, "layers": layers, "casts": casts, "input_amaxes": amaxes}
    write_json(folder / NAME, content)


def read_record(folder: Path) -> Record | None:
    """The record of an exported folder; None for folders of others.

    Raises:
        ValueError: the file is damaged, or of a later version.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        version, casts = record["version"], {name: LinearCasts.of(each) for name, each in record["casts"].items()}
        layers = {layer: casts[choose("casts", name, casts)] for layer, name in record["layers"].items()}
        amaxes = {layer: float(amax) for layer, amax in record.get("input_amaxes", {}).items()}
        format = str(record["format"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): export again.") from error
    if version > _VERSION:
        raise ValueError(f"{path} has version {version}, and this lightning_lowbit reads up to {_VERSION}.")
    return Record(format, layers, amaxes)
