"""The files of a folder of ``transformers``: JSON, and tensors in ``*.safetensors``.

A file that is damaged or missing is a ``ValueError`` that names it. ``model.safetensors`` or
``model.safetensors.index.json`` says which files hold the weights; others in the folder are not read.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightning_lowbit.checks import some

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "Export or download the folder again."


class Place(NamedTuple):
    """The place of a tensor: its file, and the name of its dtype there, such as ``"BF16"``."""

    file: Path
    dtype: str


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file, which is a mapping."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({first_line(error)}). {AGAIN}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not the mapping that it should. {AGAIN}")
    return content


def locate(folder: Path) -> dict[str, Place]:
    """Finds the tensors of a folder by name; reads the headers of its files alone. A ``ValueError`` if one is missing,
    damaged or outside of the folder, the index and the files differ, or two files hold a tensor of the same name."""
    index = _index(folder)
    places: dict[str, Place] = {}
    for name in sorted({*index.values()}) if index is not None else [WHOLE]:
        file = _inside(folder, name)
        with opened(file) as tensors:
            for key in tensors.keys():  # noqa: SIM118  it is no mapping
                if key in places:
                    raise ValueError(f"{file} and {places[key].file.name} both hold {key}. {AGAIN}")
                places[key] = Place(file, str(tensors.get_slice(key).get_dtype()))
    if index is not None:
        lacking = [key for key, name in index.items() if key not in places or places[key].file.name != name]
        others = [key for key in places if key not in index]
        if lacking or others:
            what = f"names {some(lacking)}, which its files lack" if lacking else f"does not name {some(others)}"
            raise ValueError(f"{folder / INDEX} {what}. {AGAIN}")
    return places


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a folder by name, as the files have them; raises as :func:`locate`."""
    places = locate(folder)
    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(place.file for place in places.values()):
        with opened(file) as content:
            tensors |= {name: content.get_tensor(name) for name, place in places.items() if place.file == file}
    return tensors


def is_saved_safely(folder: Path) -> bool:
    """Returns whether the weights of a folder are in ``*.safetensors``."""
    return (folder / WHOLE).exists() or (folder / INDEX).exists()


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Opens a file of tensors; an error now, or while it is read, is a ``ValueError``."""
    from safetensors import SafetensorError, safe_open  # comes with transformers

    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({first_line(error)}). {AGAIN}") from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its class where it has none."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(". ") or type(error).__name__


def _index(folder: Path) -> Mapping[str, str] | None:
    """Returns the file of each tensor, by the index; None for one file."""
    if not (folder / INDEX).exists():
        if not (folder / WHOLE).exists():
            raise ValueError(f"{folder} has no weights: neither {WHOLE} nor {INDEX}. {AGAIN}")
        return None
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from names of tensors to names of files. {AGAIN}")
    if (folder / WHOLE).exists() and WHOLE not in places.values():
        raise ValueError(
            f"{folder} has both {WHOLE} and {INDEX}, which does not name it. Remove the one of old weights."
        )
    return places


def _inside(folder: Path, name: str) -> Path:
    """Returns a file of a folder, or a link there, which may lead anywhere: whoever made the folder has set it."""
    file = folder / name
    if Path(name).name != name:
        raise ValueError(f"{folder / INDEX} names {name}, which is outside of the folder. Copy the file into it.")
    if not file.is_file():
        raise ValueError(f"{file} is no file, or is not there. {AGAIN}")
    return file
