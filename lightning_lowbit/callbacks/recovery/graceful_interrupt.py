"""Ctrl-C and SIGTERM that lose nothing."""

import os
import signal
import threading
from types import FrameType
from typing import Any

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
    rank_zero_info,
    validation_is_due,
)
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.recovery.crash_safe_checkpoint import save_checkpoint

TERMINATED = 128 + signal.SIGTERM  # the exit status of what SIGTERM has ended, for shells and schedulers

_STOPS = {signal.SIGINT, signal.SIGTERM}


class GracefulInterrupt(LowBitCallback):
    """On Ctrl-C or SIGTERM, finishes the optimizer step, saves a checkpoint and stops; a second Ctrl-C stops at once.

    A signal in the middle of a step leaves gradients and counters half-way, from where no run can be resumed exactly. A
    validation that is due at that step, or running, comes first. The checkpoint goes where the Trainer's
    ``ModelCheckpoint`` puts its own, as ``interrupted.ckpt``, or into ``default_root_dir``; never half of it, and an
    earlier one stays until it is whole. All ranks stop at the same step, whichever of them has the signal.

    After SIGTERM, which SLURM, ``timeout`` and ``docker stop`` send, the exit status is 143, of a process that was
    stopped and has not finished. They kill what is left after a while: the rest of a step, a validation and a save have
    to fit into that time. Further SIGTERMs change nothing.

    The signal at which Lightning saves and queues a job of SLURM again (``SLURMEnvironment(auto_requeue=True)``) waits
    for the end of the step, too. A signal that is ignored when training begins, as Ctrl-C by a script's background
    jobs, stays ignored.

    Example:
        >>> Trainer(callbacks=[GracefulInterrupt(), CrashSafeCheckpoint(every_n_train_steps=500, save_last=True)])
    """

    def __init__(self) -> None:
        self._process = 0
        self._requested: set[int] = set()  # signals
        self._given: dict[int, Any] = {}  # of each signal the handler before the training
        self._taken: dict[int, Any] = {}  # the one of Lightning that this stands in for

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Looks how signals are handled before Lightning has its own handlers."""
        super().setup(trainer, pl_module, stage)
        numbers = [signal.SIGINT, signal.SIGTERM]
        environment = cluster_environment(trainer)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            numbers.append(environment.requeue_signal)
        self._given = {number: signal.getsignal(number) for number in numbers}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes over the signals (which only a main thread may do)."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        self._requested = {signal.SIGTERM} if trainer.received_sigterm else set()
        for number, given in self._given.items():
            if number not in _STOPS and given not in (None, signal.SIG_DFL):
                continue  # Lightning leaves this one to the user
            self._taken[number] = signal.signal(number, given if given is signal.SIG_IGN else self._request)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Saves and stops, at the end of an optimizer step without a validation."""
        if not validation_is_due(trainer):
            self._answer(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves and stops, at the end of an optimizer step with a validation."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._answer(trainer)

    def _answer(self, trainer: Trainer) -> None:
        if is_mid_step(trainer):  # a validation may come in the middle of an optimizer step
            return
        requested = self._requested_of_any_rank(trainer)
        self._requested -= requested
        for number in requested - _STOPS:
            self._taken[number](number, None)
        if not requested & _STOPS:
            return
        self._requested |= requested  # so that a second Ctrl-C stops at once
        path = os.path.join(self._folder(trainer), "interrupted.ckpt")
        save_checkpoint(trainer, path)
        rank_zero_info(f"Interrupted after step {trainer.global_step}. To go on: --ckpt_path {path}")
        raise SIGTERMException(_status(trainer)) if signal.SIGTERM in requested else KeyboardInterrupt

    def _requested_of_any_rank(self, trainer: Trainer) -> set[int]:
        """A signal may reach some processes only, or one of them a step late.

        They ask each other after each step: ``docker stop`` waits for ten seconds only, and Lightning itself lets them
        meet before each batch, so that this costs little.
        """
        if trainer.world_size == 1:
            return set(self._requested)
        flags = torch.tensor([number in self._requested for number in self._given], dtype=torch.int32)
        flags = trainer.strategy.reduce(flags.to(trainer.strategy.root_device), reduce_op="max")
        return {number for number, flag in zip(self._given, flags.tolist(), strict=True) if flag}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the signals back."""
        self._give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Gives the signals back, but not in a shutdown after one of them, which Lightning ends with doing so."""
        if isinstance(exception, SIGTERMException) and exception.code is None:  # from Lightning, before the first step
            exception.code = _status(trainer)
        if isinstance(exception, SIGTERMException | KeyboardInterrupt):
            self._taken.clear()
        self._give_back()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker of a loader, which has inherited this handler
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and self._requested & _STOPS:
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            rank_zero_info("\nInterrupted: finishing this step. Press Ctrl-C again to stop at once.")
        elif number not in self._requested:
            rank_zero_info(f"\n{signal.Signals(number).name}: finishing this step.")
        self._requested.add(number)
        if number == signal.SIGTERM and callable(self._given[number]):
            self._given[number](number, frame)

    def _give_back(self) -> None:
        for number, handler in self._taken.items():
            signal.signal(number, handler)
        self._taken.clear()

    @staticmethod
    def _folder(trainer: Trainer) -> str | os.PathLike[str]:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath:
                return callback.dirpath
        return trainer.default_root_dir


def _status(trainer: Trainer) -> int:
    """Of this process. Lightning kills the first one if one that it has started itself ends with another one than 0."""
    environment = cluster_environment(trainer)
    return 0 if isinstance(environment, LightningEnvironment) and trainer.local_rank != 0 else TERMINATED
