"""What callbacks that watch a run have in common: when they measure, when they read, what they forget.

    on_train_batch_start    the numbers of the last steps that were measured, read by one copy: warnings
    in between              measuring, in tensors on the device: `_keep`, `_log`
    on_train_end            the last numbers

Lightning's logger has copied what was logged, and waited for it, by the time the next batch begins: nothing is left to
wait for then. A value that was logged is dropped there: Lightning would log it again and again until the epoch ends.

Not all passes through the model are of training: a callback that looks at passes `LooksAway` from the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit._lightning import LightningModule, Logger, Trainer, forget_logged, is_logging_step, logger_step
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.monitors.alerts import Alerts

_MOST_UNREAD = 100  # measurements that wait to be read where the logger takes none


class LooksAway(ABC):
    """What a callback derives from that looks at passes through the model, but only at those of training.

    Example:
        >>> class Watches(Callback, LooksAway):
        ...     @contextmanager
        ...     def look_away(self):
        ...         self.is_looking = False
        ...         yield
        ...         self.is_looking = True
    """

    @abstractmethod
    def look_away(self) -> AbstractContextManager[None]:
        """A context for passes that are not those of training; in ``on_after_backward`` of any callback."""


class Monitor(LowBitCallback):
    """Measures on the device, logs what it measured, and reads it one batch later.

    A subclass measures in hooks of its own, hands what it found to :meth:`_keep` and :meth:`_log`, and says in
    :meth:`_judge` what to make of the numbers. It calls ``super()`` in the hooks that are here.
    """

    def __init__(self) -> None:
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Forgets another run."""
        self._alerts = Alerts(self)
        self._forget()

    def _forget(self) -> None:
        """Forgets what lies between two batches: training starts, or goes on."""
        self._unread: list[tuple[Any, Tensor]] = []
        self._loggers: list[Logger] = []
        self._logged: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets another run."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.global_step == 0:  # or else the same Trainer goes on; checkpoints come later
            self._start_afresh()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins, also after a checkpoint was loaded."""
        self._forget()
        self._loggers = list(trainer.loggers)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Reads what was measured, if it was logged."""
        if self._logged or len(self._unread) >= _MOST_UNREAD:
            self._read()
        forget_logged(trainer, self._logged)
        self._logged = []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the numbers of the last steps."""
        self._read()

    def report_alerts(self, trainer: Trainer) -> list[str]:
        """What was warned of, for the page of the run."""
        self._read()
        return self._alerts.texts()

    # --- for subclasses ---

    @staticmethod
    def _is_logged(trainer: Trainer) -> bool:
        """Whether the logger takes what the optimizer step under way logs; the same for all its micro-batches."""
        return is_logging_step(trainer)

    def _log(self, pl_module: LightningModule, metrics: Mapping[str, Tensor]) -> None:
        """Logs 0-d tensors, in ``on_train_batch_end``."""
        pl_module.log_dict(dict(metrics), batch_size=1)
        self._logged += list(metrics)

    @staticmethod
    def _logger_step(trainer: Trainer) -> int:
        """The step at which the logger takes what is logged in this batch: optimizer steps before this one."""
        return logger_step(trainer)

    def _write(self, numbers: Mapping[str, float], step: int) -> None:
        """Gives numbers to the loggers themselves, once they are read.

        For hundreds of them: Lightning takes about a millisecond for each that is logged. They are no metrics that a
        callback could wait for.
        """
        for logger in self._loggers:
            logger.log_metrics(dict(numbers), step=step)

    def _keep(self, what: Any, numbers: Tensor) -> None:
        """Keeps a vector on the device, to be read later; ``what`` says of what it is."""
        self._unread.append((what, numbers))

    def _judge(self, what: Any, numbers: Sequence[float]) -> int:
        """Looks at what was kept, now that its numbers are known, and notes alerts.

        Returns:
            The optimizer step that they are of.
        """
        raise NotImplementedError

    def _read(self) -> None:
        """Turns all that was kept into numbers, by one copy, and looks at it."""
        unread, self._unread = self._unread, []
        try:
            numbers = torch.cat([row for _, row in unread]).tolist() if unread else []
        except RuntimeError as error:
            if is_of_device(error):  # whatever comes next says so
                return
            raise
        start = 0
        for what, row in unread:
            step = self._judge(what, numbers[start : start + len(row)])
            self._alerts.say(step)
            start += len(row)


def is_of_device(error: RuntimeError) -> bool:
    """Whether it is an error of an accelerator, after which nothing can be copied from there."""
    return isinstance(error, torch.AcceleratorError) or any(name in str(error) for name in ("CUDA error", "HIP error"))
