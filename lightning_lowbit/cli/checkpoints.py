"""What ``--ckpt_path`` means: ``last``, ``last-good`` or a path."""

import re
from pathlib import Path
from typing import Any

from lightning_lowbit._lightning import rank_zero_only
from lightning_lowbit.atomic_files import mend
from lightning_lowbit.callbacks.recovery.whole_checkpoints import (
    FOREIGN,
    DamagedCheckpointError,
    damage,
    find,
    first_whole,
)
from lightning_lowbit.cli.configs import as_list
from lightning_lowbit.precision.checkpoints.files import is_text

_SUFFIX = ".ckpt"
_WHOLE = re.compile(r"(.*\.)?(auto|ddp\w*|DDPStrategy|SingleDeviceStrategy)")  # strategies that load files alone


def resolve(path: str | None, trainer: Any, trains: bool) -> str | None:
    """The checkpoint to resume from, or an alias that Lightning resolves itself.

    ``last`` is the newest checkpoint of this recipe's runs, ``last-good`` the newest undamaged one. ``trainer`` is the
    configuration of the Trainer; training (``trains``) removes files that crashed runs left behind. A checkpoint that
    is missing or damaged is a ``FileNotFoundError`` or ``DamagedCheckpointError``.
    """
    if path in ("last", "last-good"):
        folders = _folders(trainer)
        if trains and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            for folder in folders:
                mend(folder, _SUFFIX)
        found = _find_last(path, folders)
        _check_strategy(found, trainer)
        print(f"Resuming from {found}")
        return str(found)
    if path in (None, "best", "hpc") or re.match(r"\w+:", str(path)):
        return path
    if not Path(str(path)).exists():
        raise FileNotFoundError(f"The checkpoint {path!r} does not exist. Give another path, or leave out --ckpt_path.")
    _check_strategy(Path(str(path)), trainer)
    wrong = damage(Path(str(path)))
    if wrong == FOREIGN and is_text(Path(str(path))):
        raise ValueError(f"{path} is a text, and no checkpoint. Give the path of one, or leave out --ckpt_path.")
    if wrong not in (None, FOREIGN):  # other plugins may write other files
        raise ValueError(f"The checkpoint {path} is damaged: it {wrong}. Give another one, or --ckpt_path last-good.")
    return path


def _check_strategy(path: Path, trainer: Any) -> None:
    """Raises if a strategy, which may be a name or a class in the configuration, does not load a folder of shards."""
    strategy = getattr(trainer, "strategy", None)
    strategy = str(getattr(strategy, "class_path", strategy))
    if path.is_dir() and _WHOLE.fullmatch(strategy):
        raise ValueError(
            f"{path} is a folder of shards, which the strategy {strategy} does not load. Give --trainer.strategy of "
            "the run that saved it, or the file that `python -m "
            f"lightning.pytorch.utilities.consolidate_checkpoint {path}` makes of it."
        )


def find_checkpoints(*folders: Path) -> list[Path]:
    return find(*folders, suffix=_SUFFIX)


def _find_last(which: str, folders: list[Path]) -> Path:
    found = find_checkpoints(*folders)
    newest, damaged = first_whole(found)
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
    found = [Path(folder) for folder in folders if folder is not None]
    if not found:
        need = "--ckpt_path last needs the folder of the run"
        raise ValueError(f"{need}: set the logger's save_dir or trainer.default_root_dir, or give a path.")
    return found
