"""Reads checkpoints (files, or folders of shards) without a Trainer, and validates their state."""

import os
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from lightning_lowbit.checks import choose
from lightning_lowbit.nn.casts import PHASES

CHECKPOINT_KEY = "lightning_lowbit"

Checkpoint = str | os.PathLike[str] | Mapping[str, Any]

_META = "meta.pt"  # the name that Lightning's strategies use
_REQUIRED = object()
_NUMBER = int | float
_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")  # keys of torch's state


def load_checkpoint(checkpoint: Checkpoint, weights_only: bool = True) -> Mapping[str, Any]:
    """The content of a file, of a folder but for weights, or as given; ``FileNotFoundError``, ``ValueError``."""
    if isinstance(checkpoint, Mapping):
        return checkpoint
    if not isinstance(checkpoint, str | os.PathLike):
        raise ValueError(f"A checkpoint is a path, or what torch.load returned; got {checkpoint!r}.")
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        path /= _META
        if not path.exists():
            raise ValueError(f"{path.parent} is no checkpoint: a folder with one has a file {_META}.")
    if not path.exists():
        raise FileNotFoundError(f"The checkpoint {path} does not exist.")
    if is_text(path):
        raise ValueError(f"{path} is a text, and no checkpoint. Give a file that ModelCheckpoint or torch.save wrote.")
    try:
        mmap = zipfile.is_zipfile(path)  # tensors are read on first use
        loaded = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except Exception as error:  # damaged files raise errors of pickle, zipfile or torch
        hint = ". If you trust whoever wrote it, give weights_only=False" if weights_only else ""
        first = next(iter(str(error).strip().splitlines()), "").rstrip(".") or type(error).__name__
        raise ValueError(f"{path} cannot be loaded ({first}){hint}.") from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, not the mapping that a checkpoint is.")
    return loaded


def is_text(path: Path) -> bool:
    """Whether a file begins as a text does."""
    with path.open("rb") as file:
        beginning = file.read(4096)
    return b"\0" not in beginning and beginning.decode("utf-8", "ignore").encode() == beginning != b""


def load_weights(model: nn.Module, checkpoint: Checkpoint, weights_only: bool = True) -> None:
    """Loads all weights of a model from a checkpoint; raises ``ValueError`` if some are missing or differ in shape."""
    own = model.state_dict()
    if isinstance(checkpoint, Mapping) or not Path(checkpoint).expanduser().is_dir():
        given = load_checkpoint(checkpoint, weights_only).get("state_dict")
        if not isinstance(given, Mapping):
            raise ValueError("The checkpoint holds no weights (no state_dict): give weights=False to load the rest.")
    else:
        given = load_shards(own, Path(checkpoint).expanduser())
    if missing := [name for name in own if name not in given]:
        lacks = f"lacks {len(missing)} of the model's {len(own)} tensors, e.g. {missing[0]}"
        raise ValueError(
            f"The checkpoint {lacks}; it has e.g. {next(iter(given), 'none')}. If the model is a part of the module "
            "that was trained, give its name there as prefix."
        )
    if packed := [name for name in own if given[name].dtype == torch.uint8 != own[name].dtype]:
        raise ValueError(
            f"The checkpoint keeps {len(packed)} weights as codes, e.g. {packed[0]}, and the model matrices. Build the "
            "model as for training: call pack_frozen(model, casts) first."
        )
    try:
        model.load_state_dict({name: given[name] for name in own})
    except RuntimeError as error:  # shapes differ
        raise ValueError(str(error)) from error


def load_shards(own: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The tensors of a folder of shards that have a name, shape and dtype in ``own``, on the CPU."""
    reader = FileSystemReader(folder)
    there = reader.read_metadata().state_dict_metadata
    # Prefixes of Lightning's strategies for FSDP1 and FSDP2.
    prefix = next((p for p in ("model.", "state_dict.") if any(f"{p}{name}" in there for name in own)), "")
    names = [name for name in own if f"{prefix}{name}" in there]
    found = {f"{prefix}{name}": torch.empty_like(own[name], device="cpu") for name in names}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        load_distributed(found, storage_reader=reader, no_dist=True)
    return {name: found[f"{prefix}{name}"] for name in names}


def entry(state: Mapping[str, Any], key: str, kind: Any, where: str = "", default: Any = _REQUIRED) -> Any:
    """The entry of the plugin's state at ``where`` + ``key``, or ``default``; ``ValueError`` for a wrong type."""
    here, value = f"The checkpoint's state of {CHECKPOINT_KEY} has", state.get(key, default)
    if value is _REQUIRED:
        raise ValueError(f"{here} no entry {where}{key}: {_ADVICE}")
    wrong = isinstance(value, bool) and kind in (int, _NUMBER)
    if value is not default and (wrong or not isinstance(value, kind)):
        needed = getattr(kind, "__name__", None) or kind
        raise ValueError(f"{here} {where}{key} = {_shown(value)}, which should be {needed}: {_ADVICE}")
    return value


def state_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the validated plugin state of a checkpoint, or None. A ``ValueError`` names an invalid entry."""
    if checkpoint.get(CHECKPOINT_KEY) is None:
        return None
    state: Mapping[str, Any] = entry(checkpoint, CHECKPOINT_KEY, Mapping)
    for key in ("step", "micro_batch"):
        if entry(state, key, int) < 0:
            raise ValueError(f"The checkpoint's state of {CHECKPOINT_KEY} has {key} = {state[key]}, below 0: {_ADVICE}")
    entry(state, "seed", int)
    choose("phase in the checkpoint", entry(state, "phase", str), PHASES)
    blend = entry(state, "blend", Tensor | _NUMBER, default=1.0)  # older versions had no λ
    if isinstance(blend, Tensor) and blend.numel() != 1:
        raise ValueError(f"The checkpoint's blend is one number; got {_shown(blend)}: {_ADVICE}")
    if entry(state, "accumulated", int, default=1) < 1:
        raise ValueError(f"The checkpoint's accumulated is 1 or more; got {state['accumulated']}: {_ADVICE}")
    entry(state, "averaged", bool, default=False)
    entry(state, "skipped_steps", int, default=0)
    scaler = entry(state, "scaler", Mapping, default={})
    for key in {*_SCALER, *scaler} if scaler else ():
        entry(scaler, key, _NUMBER, "scaler.")
    for name in (casts := entry(state, "casts", Mapping, default={})):
        entry(casts, name, Mapping, "casts.")
    kinds = ["amax_history", "channel_amax"] if {"amax_history", "channel_amax"} & state.keys() else []
    for kind in kinds + ["gradient_scale"] * ("gradient_scale" in state):  # which older versions do not have
        for name, amaxes in entry(state, kind, Mapping).items():
            entry({name: amaxes}, name, Tensor, f"{kind}.")
            if amaxes.dim() != 1 or not amaxes.is_floating_point():
                what = f"The checkpoint's {kind} of {name} is one row of floating-point numbers"
                raise ValueError(f"{what}; got {_shown(amaxes)}: {_ADVICE}")
    entry(state, "trained", Mapping | None, default=None)
    return state


_ADVICE = "it was damaged, or written by another version. Load another checkpoint, or only the weights of this one."


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
