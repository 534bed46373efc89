"""Saves a checkpoint on Ctrl-C and SIGTERM."""

import os
import shlex
import signal
import threading
from types import FrameType
from typing import Any, NoReturn

import torch

from lightning_lowbit._lightning import (
    LightningEnvironment,
    LightningModule,
    ModelCheckpoint,
    SIGTERMException,
    SLURMEnvironment,
    Trainer,
    cluster_environment,
    is_mid_step,
    is_validation_of_fit,
    rank_zero_info,
    validation_is_due,
)
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.recovery.crash_safe_checkpoint import save_checkpoint
from lightning_lowbit.signals import handle

TERMINATED = 128 + signal.SIGTERM  # exit status after SIGTERM, by convention of shells

_STOPS = {signal.SIGINT, signal.SIGTERM}


class GracefulInterrupt(LowBitCallback):
    """Finishes the optimizer step on Ctrl-C or SIGTERM, saves a checkpoint and stops; a second Ctrl-C stops at once.

    A validation that is running or due at that step comes first. The checkpoint is ``interrupted.ckpt``, in the folder
    of the Trainer's ``ModelCheckpoint`` or else in ``default_root_dir``, written as by ``CrashSafeCheckpoint``.
    All ranks stop at the same step, whichever of them gets the signal. After SIGTERM, sent by SLURM, ``timeout`` and
    ``docker stop``, the exit status is 143; their delay before killing the process must suffice for the rest of the
    step, a validation and a save. The signal at which Lightning requeues a SLURM job
    (``SLURMEnvironment(auto_requeue=True)``) also waits for the end of the step. Signals ignored at the start of
    training stay ignored, such as Ctrl-C in background jobs of a script. It goes behind the other callbacks of the list
    when training begins, so that the checkpoint has their states after the step.

    Examples:
        >>> Trainer(callbacks=[GracefulInterrupt(), CrashSafeCheckpoint(every_n_train_steps=500, save_last=True)])
    """

    def __init__(self) -> None:
        self._requested: set[int] = set()  # signals
        self._late: set[int] = set()  # those that came after the last step
        self._handlers: dict[int, Any] = {}  # by signal, the handler before training
        self._replaced: dict[int, Any] = {}  # by signal, the replaced handler of Lightning

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        checkpoints = trainer.checkpoint_callbacks  # which stay last
        # A new list: Lightning goes through the old one just now.
        trainer.callbacks = sorted(trainer.callbacks, key=lambda one: (one in checkpoints, one is self))  # type: ignore[attr-defined]
        numbers = [signal.SIGINT, signal.SIGTERM]
        environment = cluster_environment(trainer)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            numbers.append(environment.requeue_signal)
        self._handlers = {number: signal.getsignal(number) for number in numbers}

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the handlers: that of Lightning would wait here for a signal to each rank."""
        self._install_handlers(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops before the first step, with nothing to save."""
        if requested := self._all_requested(trainer) & _STOPS:
            self._stop(trainer, requested)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install_handlers(trainer)

    def _install_handlers(self, trainer: Trainer) -> None:
        """Installs the handlers, which only the main thread may do."""
        if self._replaced or threading.current_thread() is not threading.main_thread():
            return
        self._requested = {signal.SIGTERM} if trainer.received_sigterm else set()
        for number, handler in self._handlers.items():
            if number not in _STOPS and handler not in (None, signal.SIG_DFL):
                continue  # Lightning keeps the user's handler
            self._replaced[number] = handle(number, handler if handler is signal.SIG_IGN else self._request)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not validation_is_due(trainer):
            self._answer(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_validation_of_fit(trainer):
            self._answer(trainer)

    def _answer(self, trainer: Trainer) -> None:
        if is_mid_step(trainer):  # a validation may run in the middle of a step
            return
        requested = self._all_requested(trainer)
        self._requested -= requested
        for number in requested - _STOPS:
            self._replaced[number](number, None)
        if not requested & _STOPS:
            return
        self._requested |= requested  # so that a second Ctrl-C stops at once
        path = os.path.join(self._folder(trainer), "interrupted.ckpt")
        save_checkpoint(trainer, path)
        rank_zero_info(f"Interrupted after step {trainer.global_step}. To resume: --ckpt_path {shlex.quote(str(path))}")
        self._stop(trainer, requested)

    def _stop(self, trainer: Trainer, requested: set[int]) -> NoReturn:
        raise SIGTERMException(_status(trainer)) if signal.SIGTERM in requested else KeyboardInterrupt

    def _all_requested(self, trainer: Trainer) -> set[int]:
        """Returns the signals of all ranks, exchanged after each step: ``docker stop`` waits only ten seconds."""
        if trainer.world_size == 1:
            return set(self._requested)
        flags = torch.tensor([number in self._requested for number in self._handlers], dtype=torch.int32)
        flags = trainer.strategy.reduce(flags.to(trainer.strategy.root_device), reduce_op="max")
        return {number for number, flag in zip(self._handlers, flags.tolist(), strict=True) if flag}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._late = self._all_requested(trainer) & _STOPS
        self._restore_handlers()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops for a signal that came after the last step, once all callbacks have saved what they save at the end."""
        late, self._late = self._late, set()
        if late:
            self._stop(trainer, late)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the handlers, unless a signal ended the run: then Lightning does."""
        if isinstance(exception, SIGTERMException) and exception.code is None:  # Lightning, before the first step
            exception.code = _status(trainer)
        if isinstance(exception, SIGTERMException | KeyboardInterrupt):
            self._replaced.clear()
        self._restore_handlers()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._requested & _STOPS:
                raise KeyboardInterrupt
            rank_zero_info("\nInterrupted: finishing this step. Press Ctrl-C again to stop at once.")
        elif number not in self._requested:
            rank_zero_info(f"\n{signal.Signals(number).name}: finishing this step.")
        self._requested.add(number)
        if number == signal.SIGTERM and callable(self._handlers[number]):
            self._handlers[number](number, frame)

    def _restore_handlers(self) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()

    @staticmethod
    def _folder(trainer: Trainer) -> str | os.PathLike[str]:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath:
                return callback.dirpath
        return trainer.default_root_dir


def _status(trainer: Trainer) -> int:
    """Returns the exit status: 0 in child processes of Lightning, which kills the main process if one fails."""
    environment = cluster_environment(trainer)
    return 0 if isinstance(environment, LightningEnvironment) and trainer.local_rank != 0 else TERMINATED
