"""Reads checkpoints (files, or folders of shards) without a Trainer, and validates their state and weights.

Names, shapes and dtypes of weights are compared with a model's before they are loaded. Shards of a folder are described
by ``.metadata``, a pickle. torch reads it with any class that it names; here it may name torch's own descriptions
alone, as ``weights_only`` promises.
"""

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from lightning_lowbit.atomic_files import being_written, named, put_in_place
from lightning_lowbit.checks import choose, is_number, some
from lightning_lowbit.nn.casts.linear_casts import PHASES
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.saved_state import NUMBER, OneOf, check_state, count, is_dense, row, shown

CHECKPOINT_KEY = "lightning_lowbit"
DEPTH = 6  # of folders in which a checkpoint is looked for, as in runs/compare/ROW/seed_0/version_0/checkpoints

Checkpoint = str | os.PathLike[str] | Mapping[str, Any]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # in which weights are kept

META, INDEX = "meta.pt", ".metadata"  # the names that Lightning's strategies and torch use
_OBJECT = re.compile(r"(?i:unsupported global):? (?:GLOBAL )?([\w.]+)")  # in errors of torch.load
_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")  # keys of torch's state

TRUST = "If you trust whoever wrote it, give weights_only=False."


def load_checkpoint(checkpoint: Checkpoint, weights_only: bool = True, advice: str = TRUST) -> Mapping[str, Any]:
    """Returns the content of a file or of a folder (without weights); a mapping is returned as it is.

    Raises ``FileNotFoundError``, or ``ValueError`` for what is no checkpoint, or a file with other objects than tensors
    and primitives, which ``weights_only`` refuses and ``advice`` is for.
    """
    if isinstance(checkpoint, Mapping):
        return checkpoint
    if not isinstance(checkpoint, str | os.PathLike):
        raise ValueError(f"A checkpoint is a path, or what torch.load returned; got {checkpoint!r}.")
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        _check_folder(path)
        path /= META
    if not path.exists():
        raise FileNotFoundError(f"The checkpoint {path} does not exist.")
    if is_text(path):
        raise ValueError(f"{path} is a text, and no checkpoint. Give a file that ModelCheckpoint or torch.save wrote.")
    try:
        mmap = zipfile.is_zipfile(path)  # tensors are read on first use
        loaded = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except Exception as error:  # damaged files raise errors of pickle, zipfile or torch
        if (named := _OBJECT.search(str(error))) is not None:
            raise ValueError(f"{path} holds an object, {named[1]}, beside tensors and primitives. {advice}") from error
        first = next(iter(str(error).strip().splitlines()), "") if isinstance(error, RuntimeError) else ""
        reason = first.partition(". ")[0].rstrip(".") or type(error).__name__
        raise ValueError(
            f"{path} cannot be loaded ({reason}). It is damaged, or no checkpoint: give another."
        ) from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, not the mapping that a checkpoint is.")
    return loaded


def _check_folder(folder: Path) -> None:
    """Raises a ``ValueError`` for a folder that is no checkpoint in shards, or a part of one."""
    if not any(folder.glob("*.distcp")) and not {META, INDEX} & {entry.name for entry in folder.iterdir()}:
        check_no_folder_of(folder)
        raise ValueError(f"{folder} is no checkpoint: a folder with one has a file {META}. Give that, or a file.")
    _check_files(folder, [META, INDEX])


def check_no_folder_of(folder: Path) -> None:
    """Raises a ``ValueError`` that names the newest checkpoint in a folder that is none itself."""
    if folder.is_dir() and (inside := named(folder, ".ckpt", DEPTH)):
        newest = max(inside, key=lambda path: path.lstat().st_mtime)
        raise ValueError(f"{folder} is a folder of checkpoints. Give one, such as {newest}.")


def _check_files(folder: Path, names: Sequence[str]) -> None:
    if lacking := [name for name in names if not (folder / name).exists()]:
        raise ValueError(
            f"{folder} is damaged: it lacks {some(lacking)}. Copy all of its files, also hidden ones, or give another "
            "checkpoint."
        )


def is_text(path: Path) -> bool:
    """Returns whether a file begins as a text does."""
    with path.open("rb") as file:
        beginning = file.read(4096)
    return b"\0" not in beginning and beginning.decode("utf-8", "ignore").encode() == beginning != b""


def state_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the validated plugin state of a checkpoint, or None. A ``ValueError`` names an invalid entry."""
    state: Mapping[str, Any] | None = checkpoint.get(CHECKPOINT_KEY)
    if state is None:
        return None
    check_state(CHECKPOINT_KEY, state, _STATE)
    choose("phase in the checkpoint", state["phase"], PHASES)
    if state.get("scaler"):  # that of a disabled scaler is empty
        check_state(CHECKPOINT_KEY, state, {"scaler": {**dict.fromkeys(_SCALER, NUMBER), str: NUMBER}})
    if {"amax_history", "channel_amax"} & state.keys():
        check_state(CHECKPOINT_KEY, state, {"amax_history": {str: row}, "channel_amax": {str: row}})
    return state


def _one_number(value: object) -> bool:
    """one number"""
    return value.numel() == 1 and is_dense(value) if isinstance(value, Tensor) else is_number(value)


def _one_or_more(value: object) -> bool:
    """1 or more"""
    return type(value) is int and value >= 1


# Older versions have no entries of names that end in "?".
_STATE = {
    "step": count,
    "micro_batch": count,
    "seed": int,
    "phase": str,
    "blend?": _one_number,
    "accumulated?": _one_or_more,
    "averaged?": bool,
    "ranks?": _one_or_more,
    "skipped_steps?": int,
    "scaler?": {},
    "casts?": {str: {}},
    "gradient_scale?": {str: row},
    "trained?": OneOf({}, type(None)),
}


def load_weights(model: nn.Module, checkpoint: Checkpoint, weights_only: bool = True) -> None:
    """Loads a model's weights; ``ValueError`` if some differ in shape or, with ``strict_loading``, are missing."""
    needed: Mapping[str, Any] = model.state_dict()
    if isinstance(checkpoint, Mapping) or not Path(checkpoint).expanduser().is_dir():
        tensors = load_checkpoint(checkpoint, weights_only).get("state_dict")
        if not isinstance(tensors, Mapping):
            raise ValueError("The checkpoint holds no weights (no state_dict): give weights=False to load the rest.")
    else:
        tensors = load_shards(needed, Path(checkpoint).expanduser())
    plain = {clean_name(name): tensor for name, tensor in tensors.items()}  # of wrappers such as torch.compile's
    tensors = {**{name: plain[known] for name in needed if (known := clean_name(name)) in plain}, **tensors}
    if not getattr(model, "strict_loading", True):
        needed = {name: tensor for name, tensor in needed.items() if name in tensors}
    if missing := [name for name in needed if name not in tensors]:
        lacks = f"lacks {len(missing)} of the model's {len(needed)} tensors, e.g. {missing[0]}"
        raise ValueError(
            f"The checkpoint {lacks}; it has e.g. {next(iter(tensors), 'none')}. If the model is a part of the module "
            "that was trained, give its name there as prefix."
        )
    if packed := [name for name in needed if _dtype(tensors[name]) == torch.uint8 != _dtype(needed[name])]:
        raise ValueError(
            f"The checkpoint keeps {len(packed)} weights as codes, e.g. {packed[0]}, and the model matrices. Build the "
            "model as for training: call pack_frozen(model, casts) first."
        )
    into_codes = {n for n in needed if _dtype(needed[n]) == torch.uint8 and _dtype(tensors[n]) in FLOATS}
    check_tensors({name: tensor for name, tensor in needed.items() if name not in into_codes}, tensors)
    try:
        model.load_state_dict({name: tensors[name] for name in needed}, strict=getattr(model, "strict_loading", True))
    except RuntimeError as error:  # a matrix has another shape than that of the codes
        raise ValueError(str(error)) from error


def check_tensors(needed: Mapping[str, Any], tensors: Mapping[str, Any], same_dtype: bool = True) -> None:
    """Raises a ``ValueError`` for entries other than the needed tensors, or in ``FLOATS`` without ``same_dtype``."""
    differences = {name: differs(needed[name], tensors[name], same_dtype) for name in needed if name in tensors}
    if wrong := {name: how for name, how in differences.items() if how is not None}:
        name = next(iter(wrong))
        others = f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
        raise ValueError(
            f"The checkpoint has another {name} than the model: {wrong[name]}{others}. Build the model as for "
            "training, in the dtype of its weights (model.to(dtype)); or load another checkpoint, if this one is "
            "damaged."
        )


def differs(needed: Any, value: Any, same_dtype: bool) -> str | None:
    """Returns how an entry of a file differs from the tensor that a model needs, in words; None if it does not."""
    if not isinstance(needed, Tensor):  # a module's extra state
        return None
    if not isinstance(value, Tensor):
        return f"it is {shown(value)}, and no tensor"
    dtypes = FLOATS if needed.dtype in FLOATS and not same_dtype else (needed.dtype,)
    if value.shape == needed.shape and value.dtype in dtypes and is_dense(value):
        return None
    return f"it is {shown(value)}, and {shown(needed)} is needed"


def load_shards(needed: Mapping[str, Any], folder: Path, same_dtype: bool = True) -> dict[str, Any]:
    """Loads the needed tensors that a folder of shards has, on the CPU; raises as :func:`check_tensors`."""
    reader = _Reader(folder)
    entries = reader.read_metadata().state_dict_metadata
    # Prefixes of Lightning's strategies for FSDP1 and FSDP2.
    prefix = next((p for p in ("model.", "state_dict.") if any(f"{p}{name}" in entries for name in needed)), "")
    described = {n: _described(entries[f"{prefix}{n}"]) for n in needed if f"{prefix}{n}" in entries}
    check_tensors({name: needed[name] for name in described}, described, same_dtype)
    shards = {f"{prefix}{name}": torch.empty(t.shape, dtype=t.dtype) for name, t in described.items()}
    with _reading(folder):
        load_distributed(shards, storage_reader=reader, no_dist=True)
    return {name: shards[f"{prefix}{name}"] for name in described}


def consolidate(folder: Path, path: Path) -> None:
    """Writes a checkpoint in shards as a file for all strategies; it must fit the memory.

    Shards may hold objects, whose code runs: the folder must be trusted. A ``ValueError`` says that there are none, or
    that they cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no checkpoint in shards, which is a folder with a file {INDEX}.")
    others = load_checkpoint(folder, weights_only=False)
    _Reader(folder).read_metadata()  # raises if it is damaged
    with being_written(path) as partial:
        with _reading(folder):
            dcp_to_torch_save(folder, partial)
        checkpoint = torch.load(partial, map_location="cpu", weights_only=False)
        if "model" in checkpoint:  # the name under FSDP1
            checkpoint["state_dict"] = checkpoint.pop("model")
        numbers = range(sum(re.fullmatch(r"optimizer_\d+", name) is not None for name in checkpoint))
        states = [checkpoint.pop(f"optimizer_{number}") for number in numbers]
        # Shards hold nothing that is empty.
        checkpoint["optimizer_states"] = [{"state": {}} | state for state in states]
        torch.save(checkpoint | others, partial)
        put_in_place(partial, path)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raises a ``ValueError`` for shards that are missing or damaged, whose errors are of many classes."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        raise ValueError(f"The shards in {folder} cannot be read ({type(error).__name__}). Give another.") from error


def _described(entry: Any) -> Any:
    """Returns a tensor of one number with the shape and dtype of a described one; other entries as they are."""
    if not isinstance(entry, TensorStorageMetadata):
        return entry
    return torch.empty((), dtype=entry.properties.dtype).expand(entry.size)


class _Reader(FileSystemReader):
    """Reads shards within their folder, and runs no code that they name."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path) / INDEX
        try:
            with path.open("rb") as file:
                metadata = _Descriptions(file).load()
            files = {info.relative_path for info in metadata.storage_data.values()}
            entries = {*map(type, metadata.state_dict_metadata)}
        except Exception as error:  # a damaged pickle raises errors of any class
            raise ValueError(f"{path} cannot be read ({error}). Give another checkpoint.") from error
        if entries - {str} or any(PurePath(name).name != name for name in files):
            raise ValueError(f"{path} names files that are not beside it. Give another checkpoint.")
        _check_files(path.parent, sorted(files))
        metadata.storage_meta = None
        return metadata


class _Descriptions(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _NAMES.get(module, ()):
            raise ValueError(f"it names {module}.{name}, and descriptions of tensors do not")
        return super().find_class(module, name)


_NAMES: Mapping[str, set[str]] = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    **dict.fromkeys(
        ("pathlib", "pathlib._local"), {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"}
    ),
    "collections": {"OrderedDict"},
}


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, Tensor) else None
