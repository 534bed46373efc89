"""Checkpoints that stay complete if a process dies while writing.

Lightning copies over the old checkpoint across file systems, and overwrites a directory of shards file by file: after a
crash, shards of two steps load without an error. And ``ckpt_path="last"`` takes directories that are half removed.
"""

import os
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import proxy

from torch import Tensor

from lightning_lowbit._lightning import (
    AsyncCheckpointIO,
    LightningModule,
    MisconfigurationException,
    ModelCheckpoint,
    Trainer,
    checkpoint_folder,
    is_local,
    validation_is_due,
)
from lightning_lowbit.atomic_files import being_written, discard, mend, name_of, put_in_place, remove, replace_link
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.recovery.whole_checkpoints import DamagedCheckpointError, find, first_whole
from lightning_lowbit.checks import is_number

_T = TypeVar("_T")


def save_checkpoint(trainer: Trainer, path: str | Path, weights_only: bool | None = None) -> None:
    """Saves a checkpoint from all ranks; at a crash, the path holds the complete new checkpoint or the old one.

    It writes ``NAME.HOST-PID.partial`` and renames it once all ranks are done; if writing fails, it is removed. Remote
    file systems cannot rename, and ``AsyncCheckpointIO`` does not say when it is done: these write to the final name.
    """
    if not is_local(path) or _writes_later(trainer):
        trainer.save_checkpoint(path, weights_only)
        return
    path = Path(path)
    with ExitStack() as until_saved:
        partial = _on_first_rank(trainer, path, lambda: until_saved.enter_context(being_written(path)))
        try:
            trainer.save_checkpoint(partial, weights_only)  # returns when all ranks have written
            _on_first_rank(trainer, path, lambda: put_in_place(partial, path))
        except BaseException:
            remove(partial)
            raise


def _on_first_rank(trainer: Trainer, path: Path, change: Callable[[], _T]) -> _T:
    """Changes files on the first rank; returns its result, or raises its error, on all ranks."""
    result: _T | None = None
    error: OSError | None = None
    if trainer.is_global_zero:
        try:
            result = change()
        except OSError as os_error:
            error = os_error
    result, message = trainer.strategy.broadcast((result, None if error is None else repr(error)))
    if error is not None:
        raise error
    if message is not None:
        raise RuntimeError(f"The first rank could not save {path}: {message}")
    return result  # type: ignore[return-value]


def _writes_later(trainer: Trainer) -> bool:
    return isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO)


def _is_score(value: object) -> bool:
    """a number, also as a tensor, or None"""
    return value is None or is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)


class CrashSafeCheckpoint(LowBitCallback, ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, which leaves only complete checkpoints after a crash.

    Checkpoints are written and removed as ``NAME.ckpt.HOST-PID.partial``, and renamed atomically once all ranks are
    done and the data are on the disk. A directory that is being replaced is ``NAME.ckpt.HOST-PID.previous``, where
    ``ckpt_path="last"`` finds it after a crash. The next training run in the folder removes leftovers: at once on the
    same machine, after an hour on another. A link (``save_last="link"``) always has a target. Concurrent runs need
    separate folders.

    ``ckpt_path="last"`` takes the newest by step of ``last.ckpt``, ``last-v1.ckpt`` and so on, and verifies its
    checksums; if it is damaged, a :class:`DamagedCheckpointError` names the newest complete checkpoint. A checkpoint
    due at the same step as a validation is saved after it. Arguments and state are those of ``ModelCheckpoint``.

    Raises:
        MisconfigurationException: when training starts: ``dirpath`` is remote, or an ``AsyncCheckpointIO`` is used.

    Examples:
        >>> Trainer(callbacks=[CrashSafeCheckpoint(every_n_train_steps=500, save_last=True)])
    """

    saved: ClassVar[Any] = {
        "best_model_path": str,
        "best_model_score": _is_score,
        "best_k_models?": {str: _is_score},
        "kth_best_model_path?": str,
        "kth_value?": _is_score,
        "last_model_path?": str,
        "dirpath?": str | None,
    }

    _until_validated: tuple[Any, ...] | None = None  # batch arguments, kept until after the validation

    @property
    def state_key(self) -> str:
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def _load(self, state: dict[str, Any]) -> None:
        ModelCheckpoint.load_state_dict(self, state)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        assert self.dirpath is not None
        if stage != "fit":
            return
        why = f"{type(self).__name__} renames checkpoints once they are whole"
        if not is_local(self.dirpath):
            raise MisconfigurationException(
                f"{why}, which needs a local or mounted file system; got dirpath={str(self.dirpath)!r}. Use "
                "Lightning's ModelCheckpoint there: object stores show a file once all of it has arrived."
            )
        if _writes_later(trainer):
            raise MisconfigurationException(
                f"{why}, and AsyncCheckpointIO does not say when: leave it out, or use Lightning's ModelCheckpoint."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not pl_module.automatic_optimization:
            # Lightning wants weights from before the step, which would not resume. Once: a change of the filters makes
            # Python forget which warnings it has shown.
            warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization", UserWarning)
        if trainer.is_global_zero:
            mend(Path(str(self.dirpath)), self.FILE_EXTENSION)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        self._until_validated = batch if validation_is_due(trainer) else None
        if self._until_validated is None:
            super().on_train_batch_end(trainer, pl_module, *batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batch, self._until_validated = self._until_validated, None
        if batch is not None:
            super().on_train_batch_end(trainer, pl_module, *batch)
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning would save the last one
            super().on_train_end(trainer, pl_module)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        folder = checkpoint_folder(self, trainer)
        if not is_local(folder):
            return super()._find_last_checkpoints(trainer)
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            mend(Path(folder), self.FILE_EXTENSION)
        paths = find(Path(folder), suffix=self.FILE_EXTENSION, depth=0)
        last = [path for path in paths if re.match(rf"{self.CHECKPOINT_NAME_LAST}(-\d+)?", name_of(path))]
        newest, damaged = first_whole(last)
        if damaged:
            instead, _ = first_whole(paths)
            raise DamagedCheckpointError(damaged, instead, f"ckpt_path={str(instead)!r}")
        return set() if newest is None else {str(newest)}

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        save_checkpoint(trainer, filepath, self.save_weights_only)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if not trainer.is_global_zero:
            return
        target, newest = Path(filepath), Path(self._last_checkpoint_saved)  # saved just before
        # A link may be from an earlier run, so `last_model_path` may not name it.
        for folder in {target.parent, Path(self.dirpath or target.parent)}:
            for link in folder.glob(f"*{self.FILE_EXTENSION}"):
                if link.is_symlink() and link != target and link.resolve() == target.resolve() and newest.exists():
                    replace_link(link, newest)
        discard(target, trainer.strategy.remove_checkpoint)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            replace_link(Path(linkpath), Path(filepath))
        trainer.strategy.barrier()
