"""Ctrl-C that loses nothing."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from lightning_lowbit._lightning import LightningModule, ModelCheckpoint, Trainer, rank_zero_info
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.crash_safe_checkpoint import save_checkpoint


class GracefulInterrupt(LowBitCallback):
    """On Ctrl-C, finishes the optimizer step, saves a checkpoint and stops; a second Ctrl-C stops at once.

    An interrupt in the middle of a step leaves gradients and counters half-way, from where no run can be resumed
    exactly. A validation that is due at that step, or running, comes first. The checkpoint goes where the Trainer's
    ``ModelCheckpoint`` puts its own, as ``interrupted.ckpt``, or into ``default_root_dir``; never half of it, and an
    earlier one stays until it is whole.
    """

    def __init__(self) -> None:
        self._requested, self._process = False, 0
        self._previous: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes over the signal (which only a main thread may do)."""
        if threading.current_thread() is threading.main_thread():
            self._requested, self._process = False, os.getpid()
            self._previous = signal.signal(signal.SIGINT, self._request)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Saves and stops, at the end of an optimizer step without a validation."""
        loop: Any = trainer.fit_loop
        if not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._stop_if_requested(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves and stops, at the end of an optimizer step with a validation."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._stop_if_requested(trainer)

    def _stop_if_requested(self, trainer: Trainer) -> None:
        if trainer.fit_loop._should_accumulate():  # a validation may come in the middle of an optimizer step
            return
        # The signal may reach some processes only, or one of them a step late: they agree, now and then.
        if trainer.world_size > 1 and trainer.global_step % max(1, trainer.log_every_n_steps):  # type: ignore[attr-defined]
            return
        if not trainer.strategy.reduce_boolean_decision(self._requested, all=False):
            return
        path = os.path.join(self._folder(trainer), "interrupted.ckpt")
        save_checkpoint(trainer, path)
        rank_zero_info(f"Interrupted after step {trainer.global_step}. To go on: --ckpt_path {path}")
        raise KeyboardInterrupt

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the signal back."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Gives the signal back, but not in a shutdown after Ctrl-C, during which Lightning ignores it."""
        if isinstance(exception, KeyboardInterrupt):
            self._previous = None
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker of a loader, which has inherited this handler
            return
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        rank_zero_info("\nInterrupted: finishing this step. Press Ctrl-C again to stop at once.")

    def _restore(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    @staticmethod
    def _folder(trainer: Trainer) -> str | os.PathLike[str]:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath:
                return callback.dirpath
        return trainer.default_root_dir
