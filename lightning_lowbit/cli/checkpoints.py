"""Checkpoints that a command resumes from or evaluates."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_lowbit._lightning import rank_zero_only, say_once
from lightning_lowbit.atomic_files import mend
from lightning_lowbit.callbacks.recovery.whole_checkpoints import (
    FOREIGN,
    DamagedCheckpointError,
    damage,
    find,
    first_whole,
)
from lightning_lowbit.cli.configs import as_list
from lightning_lowbit.cli.options import check_checkpoint
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.checkpoints.files import DEPTH, is_text, load_checkpoint, state_of
from lightning_lowbit.precision.checkpoints.trained import CHANGEABLE
from lightning_lowbit.precision.run_settings import UNDECIDED

OBJECTS = "If you trust whoever wrote it, give --weights_only false."  # the advice of a refusal

_SUFFIX = ".ckpt"

# Options of a plugin on a command line, but those that an evaluation may change.
_OF_CASTS = re.compile(
    rf"--trainer\.plugins\+?(\.class_path|\.(?!(init_args\.)?({'|'.join((*CHANGEABLE, 'compute_dtype'))})\b).*)?(=.*)?",
    re.DOTALL,
)

_WHOLE = re.compile(r"(.*\.)?(auto|ddp\w*|DDPStrategy|SingleDeviceStrategy)")  # strategies that load files alone


def resolve(path: str | None, trainer: Any, trains: bool) -> str | None:
    """Returns the checkpoint to resume from, or an alias that Lightning resolves itself.

    ``last`` is the newest checkpoint of this recipe's runs, ``last-good`` the newest undamaged one. ``trainer`` is the
    configuration of the Trainer; training (``trains``) removes files that crashed runs left behind. A checkpoint that
    is missing or damaged is a ``FileNotFoundError`` or ``DamagedCheckpointError``.
    """
    if path in ("last", "last-good"):
        folders = _folders(trainer)
        if trains and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            for folder in folders:
                mend(folder, _SUFFIX)
        newest = _find_last(path, folders)
        _check_strategy(newest, trainer)
        print(f"Resuming from {newest}")
        return str(newest)
    if path is None or not check_checkpoint(path):
        return path
    _check_strategy(Path(path), trainer)
    fault = damage(Path(path))
    if fault == FOREIGN and is_text(Path(path)):
        raise ValueError(f"{path} is a text, and no checkpoint. Give the path of one, or leave out --ckpt_path.")
    if fault not in (None, FOREIGN):  # other plugins may write other files
        raise ValueError(f"The checkpoint {path} is damaged: it {fault}. Give another one, or --ckpt_path last-good.")
    return path


def _check_strategy(path: Path, trainer: Any) -> None:
    """Raises if the strategy of the configuration, a name or a class, does not load a folder of shards."""
    strategy = getattr(trainer, "strategy", None)
    strategy = str(getattr(strategy, "class_path", strategy))
    if path.is_dir() and (inside := find_checkpoints(path, depth=DEPTH)):
        newest = shlex.quote(str(inside[0]))
        raise ValueError(f"{path} is a folder of checkpoints. Give one, such as the newest: --ckpt_path {newest}.")
    if path.is_dir() and _WHOLE.fullmatch(strategy):
        raise ValueError(
            f"{path} is a folder of shards, which the strategy {strategy} does not load. Give --trainer.strategy of "
            f"the run that saved it, or the file that `lowbit consolidate {shlex.quote(str(path))}` makes of it."
        )


def find_checkpoints(*folders: Path, depth: int | None = None) -> list[Path]:
    return find(*folders, suffix=_SUFFIX, depth=depth)


def _find_last(which: str, folders: list[Path]) -> Path:
    newest, damaged = first_whole(find_checkpoints(*folders))
    if damaged and (which == "last" or newest is None):
        raise DamagedCheckpointError(damaged, newest, "--ckpt_path last-good")
    if newest is None:
        where = f"there is no checkpoint (*.ckpt) below {' or '.join(map(str, folders))}"
        raise FileNotFoundError(f"--ckpt_path {which}: {where}. Give the path of one, or leave out --ckpt_path.")
    for path, wrong in damaged.items():
        print(f"{path} is damaged: it {wrong}.")
    return newest


def _folders(trainer: Any) -> list[Path]:
    # ModelCheckpoint writes to its own folder, or below that of the first logger, or the Trainer's.
    callbacks = [getattr(callback, "init_args", None) or {} for callback in as_list(trainer.callbacks or [])]
    logger = as_list(trainer.logger)[0] if trainer.logger else None
    arguments = getattr(logger, "init_args", None) or {}
    folders = [*(callback.get("dirpath") for callback in callbacks), arguments.get("save_dir")]
    if folders[-1] is None:
        folders.append(trainer.default_root_dir)
    paths = [Path(folder) for folder in folders if folder is not None]
    if not paths:
        need = "--ckpt_path last needs the folder of the run"
        raise ValueError(f"{need}: set the logger's save_dir or trainer.default_root_dir, or give a path.")
    return paths


def as_trained(
    trainer: Mapping[str, Any], path: str | None, arguments: Sequence[str], weights_only: bool = True
) -> dict[str, Any]:
    """Returns overrides of the Trainer's (instantiated) arguments that evaluate a checkpoint as it was trained.

    Empty if the path is None or not local, the checkpoint does not hold its casts, the configured plugin has
    ``casts_of_checkpoint=False``, or an argument of the command line asks for casts: the plugin then compares them.
    """
    plugins = as_list(trainer.get("plugins") or [])
    configured = next((plugin for plugin in plugins if isinstance(plugin, LowBitPrecision)), None)
    if path is None or not Path(path).exists() or (configured is not None and not configured.casts_of_checkpoint):
        return {}
    if configured is not None and any(map(_OF_CASTS.fullmatch, arguments)):
        return {}
    checkpoint = load_checkpoint(path, weights_only, OBJECTS)
    state = state_of(checkpoint)
    if state is None or state.get("trained") is None:
        return {}  # the plugin warns about it
    same: dict[str, Any] = {}
    if configured is not None:
        same = {name: getattr(configured, name) for name in ("exact", "backend", "grouped")}
    plugin = LowBitPrecision.from_checkpoint(checkpoint, **same)
    dtype = None if configured is None or configured.compute_reason == UNDECIDED else configured.compute_dtype
    if dtype not in (None, plugin.compute_dtype):
        say_once(
            f"The checkpoint was trained in {plugin.compute_dtype} and is evaluated in it, not in "
            f"{dtype}, as compute_dtype asks. casts_of_checkpoint=False takes the plugin's options."
        )
    return {"plugins": [*(other for other in plugins if other is not configured), plugin], "precision": None}
