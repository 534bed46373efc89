"""Reads checkpoints (files, or folders of shards) without a Trainer, and validates their state."""

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.checks import choose
from lightning_lowbit.nn.casts.linear_casts import PHASES

CHECKPOINT_KEY = "lightning_lowbit"

Checkpoint = str | os.PathLike[str] | Mapping[str, Any]

_META = "meta.pt"  # the name that Lightning's strategies use
_REQUIRED = object()
_OBJECT = re.compile(r"(?i:unsupported global):? (?:GLOBAL )?([\w.]+)")  # in errors of torch.load
_NUMBER = int | float
_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")  # keys of torch's state


TRUST = "If you trust whoever wrote it, give weights_only=False."


def load_checkpoint(checkpoint: Checkpoint, weights_only: bool = True, advice: str = TRUST) -> Mapping[str, Any]:
    """The content of a file, of a folder but for weights, or as given; ``FileNotFoundError``, ``ValueError``.

    ``advice`` is for a file with other objects than tensors and primitives, which ``weights_only`` refuses.
    """
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


def is_text(path: Path) -> bool:
    """Whether a file begins as a text does."""
    with path.open("rb") as file:
        beginning = file.read(4096)
    return b"\0" not in beginning and beginning.decode("utf-8", "ignore").encode() == beginning != b""


def entry(state: Mapping[str, Any], key: str, kind: Any, where: str = "", default: Any = _REQUIRED) -> Any:
    """The entry of the plugin's state at ``where`` + ``key``, or ``default``; ``ValueError`` for a wrong type."""
    here, value = f"The checkpoint's state of {CHECKPOINT_KEY} has", state.get(key, default)
    if value is _REQUIRED:
        raise ValueError(f"{here} no entry {where}{key}: {_ADVICE}")
    wrong = isinstance(value, bool) and kind in (int, _NUMBER)
    if value is not default and (wrong or not isinstance(value, kind)):
        needed = getattr(kind, "__name__", None) or kind
        raise ValueError(f"{here} {where}{key} = {shown(value)}, which should be {needed}: {_ADVICE}")
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
    if isinstance(blend, Tensor) and (blend.numel() != 1 or not is_dense(blend)):
        raise ValueError(f"The checkpoint's blend is one number; got {shown(blend)}: {_ADVICE}")
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
            if amaxes.dim() != 1 or not amaxes.is_floating_point() or not is_dense(amaxes):
                what = f"The checkpoint's {kind} of {name} is one row of floating-point numbers"
                raise ValueError(f"{what}; got {shown(amaxes)}: {_ADVICE}")
    entry(state, "trained", Mapping | None, default=None)
    return state


_ADVICE = "it was damaged, or written by another version. Load another checkpoint, or only the weights of this one."


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has a number for each place, as those have that this package writes."""
    return tensor.layout == torch.strided and not tensor.is_meta


def shown(value: Any) -> str:
    """An entry of a checkpoint, in a few words."""
    if isinstance(value, Tensor):
        how = "" if is_dense(value) else " without numbers" if value.is_meta else f" in the layout {value.layout}"
        return f"a tensor {value.dtype} of shape {tuple(value.shape)}{how}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
