"""Reads checkpoints (files, or folders of shards) without a Trainer, and validates their state."""

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.checks import choose, is_number
from lightning_lowbit.nn.casts.linear_casts import PHASES
from lightning_lowbit.saved_state import NUMBER, OneOf, check_state, count, is_dense, row

CHECKPOINT_KEY = "lightning_lowbit"

Checkpoint = str | os.PathLike[str] | Mapping[str, Any]

_META = "meta.pt"  # the name that Lightning's strategies use
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
