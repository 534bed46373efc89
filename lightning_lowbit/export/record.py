"""``lowbit.json`` in an exported folder: the casts with which each layer was trained, for :func:`load`."""

import json
from collections.abc import Mapping
from pathlib import Path

from lightning_lowbit.checks import choose
from lightning_lowbit.export.folder import write_json
from lightning_lowbit.export.source import Source
from lightning_lowbit.nn.casts import LinearCasts
from lightning_lowbit.precision.checkpoints.trained import primitive

NAME = "lowbit.json"
_VERSION = 1


def write_record(source: Source, format: str, folder: Path) -> None:
    """Writes the casts of the quantized layers by name, each once."""
    names: dict[LinearCasts, str] = {}
    layers = {}
    for name, layer in source.layers.items():
        layers[name] = names.setdefault(layer.full_casts, str(len(names)))
    casts = {name: primitive(each) for each, name in names.items()}
    write_json(folder / NAME, {"version": _VERSION, "format": format, "layers": layers, "casts": casts})


def read_record(folder: Path) -> tuple[str, Mapping[str, LinearCasts]] | None:
    """The format of an exported folder, and the casts of its layers; None for folders of others.

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
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): export again.") from error
    if version > _VERSION:
        raise ValueError(f"{path} has version {version}, and this lightning_lowbit reads up to {_VERSION}.")
    return record["format"], layers
