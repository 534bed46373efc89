"""Checkpoints that are whole, whenever a process dies.

Lightning writes a file to the temporary folder and moves it: at once, if that lies on the same file system, which on a
cluster it does not; else it copies over the checkpoint before. A directory of shards it writes over the one before,
file by file: what a crash leaves loads without an error, some shards of one step and some of another. And a directory
that a crash has left half removed is the newest one, for ``ckpt_path="last"``.
"""

import os
from collections.abc import Callable
from pathlib import Path
from weakref import proxy

from lightning_lowbit._lightning import (
    AsyncCheckpointIO,
    LightningModule,
    MisconfigurationException,
    ModelCheckpoint,
    Trainer,
    _is_local_file_protocol,
)
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.files import (
    discard,
    mend,
    partial_name,
    put_back,
    put_in_place,
    replace_link,
    unfinished,
)


def save_checkpoint(trainer: Trainer, path: str | Path, weights_only: bool | None = None) -> None:
    """``trainer.save_checkpoint``, such that a name has a whole checkpoint or none, and one if it had one before.

    It is written as ``NAME.partial``, and gets its name once all ranks are done. On a remote file system, which cannot
    rename, and by an ``AsyncCheckpointIO``, which does not say when it is done, it is written under its name.

    Args:
        trainer: on all ranks.
        path: of a file or a directory, as the strategy writes it; on a file system that all ranks share.
        weights_only: as Lightning has it.
    """
    if not _is_local(path) or _writes_later(trainer):
        trainer.save_checkpoint(path, weights_only)
        return
    path = Path(path)
    _on_first_rank(trainer, mend, path)
    trainer.save_checkpoint(partial_name(path), weights_only)  # returns when all ranks have written
    _on_first_rank(trainer, put_in_place, path)


def _on_first_rank(trainer: Trainer, change: Callable[[Path], None], path: Path) -> None:
    """Changes names on one rank, for which the others wait, and not for ever if it cannot."""
    error: OSError | None = None
    if trainer.is_global_zero:
        try:
            change(path)
        except OSError as found:
            error = found
    told = trainer.strategy.broadcast(None if error is None else repr(error))
    if error is not None:
        raise error
    if told is not None:
        raise RuntimeError(f"The first rank could not save {path}: {told}")


def _is_local(path: str | Path) -> bool:
    return _is_local_file_protocol(path)


def _writes_later(trainer: Trainer) -> bool:
    return isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO)


class CrashSafeCheckpoint(LowBitCallback, ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, of which a crash at any moment leaves whole checkpoints only.

    Files and directories, as the strategy writes them, are written and removed as ``NAME.ckpt.partial``. They get their
    name once all ranks are done and they are on the disk, at once. Where a directory takes another's place, that one is
    ``NAME.ckpt.previous`` for a moment; if a crash comes just then, it gets its name back when a training starts, or
    looks for ``ckpt_path="last"``, which so finds whole ones. What else a crash has left is then removed. A link
    (``save_last="link"``) never points to nothing.

    All arguments are those of ``ModelCheckpoint``, whose state in a checkpoint this one takes, and the other way round.
    Two checkpoints of one name need room at the same time. Runs that train at the same time need folders of their own.

    Raises:
        MisconfigurationException: when training starts: ``dirpath`` is remote, and such file systems cannot rename at
            once; or checkpoints are written in the background, by an ``AsyncCheckpointIO``.

    Example:
        >>> Trainer(callbacks=[CrashSafeCheckpoint(every_n_train_steps=500, save_last=True)])
    """

    @property
    def state_key(self) -> str:
        """That of a ``ModelCheckpoint``."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the folder, and removes what a crash has left there."""
        super().setup(trainer, pl_module, stage)
        assert self.dirpath is not None
        if stage != "fit":
            return
        if not _is_local(self.dirpath):
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
        if trainer.is_global_zero:
            for path in unfinished(Path(self.dirpath), self.FILE_EXTENSION):
                mend(path)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        folder = self._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
        if trainer.state.fn == "fit" and _is_local(folder):  # before setup, on all ranks, which do not wait for another
            for path in unfinished(Path(folder), self.FILE_EXTENSION):
                put_back(path)
        return super()._find_last_checkpoints(trainer)

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
        discard(target)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            replace_link(Path(linkpath), Path(filepath))
        trainer.strategy.barrier()
