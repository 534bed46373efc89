"""Checkpoints that are whole, whenever a process dies.

Lightning writes a file to the temporary folder and moves it: at once, if that lies on the same file system, which on a
cluster it does not; else it copies over the checkpoint before. A directory of shards it writes over the one before,
file by file: what a crash leaves loads without an error, some shards of one step and some of another. And a directory
that a crash has left half removed is the newest one, for ``ckpt_path="last"``.
"""

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar
from weakref import proxy

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
from lightning_lowbit.atomic_files import (
    being_written,
    discard,
    mend,
    name_of,
    put_in_place,
    remove,
    replace_link,
)
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.recovery.whole_checkpoints import DamagedCheckpointError, find, first_whole

_T = TypeVar("_T")


def save_checkpoint(trainer: Trainer, path: str | Path, weights_only: bool | None = None) -> None:
    """``trainer.save_checkpoint``, such that a name has a whole checkpoint or none, and one if it had one before.

    It is written as ``NAME.HOST-PID.partial``, and gets its name once all ranks are done; where it cannot be written,
    as on a full disk, what there is of it is removed. On a remote file system, which cannot rename, and by an
    ``AsyncCheckpointIO``, which does not say when it is done, it is written under its name.

    Args:
        trainer: on all ranks.
        path: of a file or a directory, as the strategy writes it; on a file system that all ranks share.
        weights_only: as Lightning has it.
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
    """What changing names on one rank returns there; the others wait for it, and not for ever if it cannot be done."""
    result: _T | None = None
    error: OSError | None = None
    if trainer.is_global_zero:
        try:
            result = change()
        except OSError as found:
            error = found
    result, told = trainer.strategy.broadcast((result, None if error is None else repr(error)))
    if error is not None:
        raise error
    if told is not None:
        raise RuntimeError(f"The first rank could not save {path}: {told}")
    return result  # type: ignore[return-value]


def _writes_later(trainer: Trainer) -> bool:
    return isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO)


class CrashSafeCheckpoint(LowBitCallback, ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, of which a crash at any moment leaves whole checkpoints only.

    Files and directories, as the strategy writes them, are written and removed as ``NAME.ckpt.HOST-PID.partial``. They
    get their name once all ranks are done and they are on the disk, at once. Where a directory takes another's place,
    that one is ``NAME.ckpt.HOST-PID.previous`` for a moment; if a crash comes just then, ``ckpt_path="last"`` finds it
    there. What a crash has left is removed by the next run that trains in the folder: at once on the same machine,
    after an hour on another one, which cannot tell whether the process lives. A full disk leaves nothing. A link
    (``save_last="link"``) never points to nothing.

    ``ckpt_path="last"`` is the newest by step of ``last.ckpt``, ``last-v1.ckpt`` and so on, and is compared with its
    checksums. One that is damaged is an error that names the newest whole checkpoint of the folder.

    A checkpoint that is due at the same step as a validation is saved after it, so that a run that dies in a validation
    repeats it when it goes on.

    All arguments are those of ``ModelCheckpoint``, whose state in a checkpoint this one takes, and the other way round.
    Two checkpoints of one name need room at the same time. Runs that train at the same time need folders of their own.

    Raises:
        MisconfigurationException: when training starts: ``dirpath`` is remote, and such file systems cannot rename at
            once; or checkpoints are written in the background, by an ``AsyncCheckpointIO``.
        DamagedCheckpointError: ``ckpt_path="last"`` is damaged; a ``ValueError``.

    Example:
        >>> Trainer(callbacks=[CrashSafeCheckpoint(every_n_train_steps=500, save_last=True)])
    """

    _until_validated: tuple[Any, ...] | None = None  # what the batch before a validation has given

    @property
    def state_key(self) -> str:
        """That of a ``ModelCheckpoint``."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the folder, and refuses one where names cannot be changed at once."""
        super().setup(trainer, pl_module, stage)
        assert self.dirpath is not None
        if stage != "fit":
            return
        if not is_local(self.dirpath):
            raise MisconfigurationException(
                f"{type(self).__name__} gives checkpoints their names once they are whole, which only local (and "
                f"mounted) file systems do at once; got dirpath={str(self.dirpath)!r}. Use Lightning's ModelCheckpoint "
                "there: object stores show a file once all of it has arrived."
            )
        if _writes_later(trainer):
            raise MisconfigurationException(
                f"{type(self).__name__} gives checkpoints their names once they are whole, and AsyncCheckpointIO does "
                "not say when that is: leave out that plugin, or use Lightning's ModelCheckpoint."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes what a crash has left in the folder."""
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            mend(Path(str(self.dirpath)), self.FILE_EXTENSION)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Saves, if that is due; where a validation is due as well, after it."""
        self._until_validated = batch if validation_is_due(trainer) else None
        if self._until_validated is None:
            super().on_train_batch_end(trainer, pl_module, *batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves, if that is due."""
        batch, self._until_validated = self._until_validated, None
        if batch is not None:
            super().on_train_batch_end(trainer, pl_module, *batch)
        super().on_validation_end(trainer, pl_module)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        folder = checkpoint_folder(self, trainer)
        if not is_local(folder):
            return super()._find_last_checkpoints(trainer)
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            mend(Path(folder), self.FILE_EXTENSION)
        found = find(Path(folder), suffix=self.FILE_EXTENSION, below=False)
        last = [path for path in found if re.match(rf"{self.CHECKPOINT_NAME_LAST}(-\d+)?", name_of(path))]
        newest, damaged = first_whole(last)
        if damaged:
            instead, _ = first_whole(found)
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
        target, newest = Path(filepath), Path(self._last_checkpoint_saved)  # which was saved just before
        # Also one that a run before this has made, of which `last_model_path` need not know.
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
