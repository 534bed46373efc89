"""Changing the precision phase in mid-training."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_lowbit.nn.casts import PHASES
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.quant.cast import choose


class PrecisionSwitch(Callback):
    """Puts all layers into a phase from a step on.

    The switch happens before the first micro-batch of that optimizer step. The phase lives in the precision plugin and
    is part of its checkpoint; this callback keeps no state. Of several switches, the last one that is due holds, and of
    several at one step the last in the list.

    Args:
        to: ``"qaf"``, ``"hp-forward"``, ``"bf16"`` or ``"fqt"``; see :meth:`LinearCasts.phase`.
        at: when, as a fraction of all optimizer steps, in [0, 1].
        step: when, as a number of optimizer steps; instead of ``at``.

    Raises:
        ValueError: no such phase, or not exactly one of ``at`` and ``step``, or one out of range.
        MisconfigurationException: when training starts: the Trainer has no plugin of lightning_lowbit, or a fraction is
            asked for of a run whose number of steps is not known.
    """

    def __init__(self, to: str, *, at: float | None = None, step: int | None = None) -> None:
        self.to = choose("phase", to, PHASES)
        if (at is None) == (step is None):
            raise ValueError(f"Give either at (a fraction of all steps) or step (a number); got at={at}, step={step}.")
        if at is not None and not 0 <= at <= 1:
            raise ValueError(f"at is a fraction of all optimizer steps, between 0 and 1; got {at}.")
        if step is not None and step < 0:
            raise ValueError(f"step is a number of optimizer steps, 0 or more; got {step}.")
        self.at = at
        self.step = step
        self._due, self._done = 0, False

    @property
    def state_key(self) -> str:
        """Tells several switches of one Trainer apart."""
        return self._generate_state_key(to=self.to, at=self.at, step=self.step)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resolves the fraction."""
        if not isinstance(trainer.precision_plugin, LowBitPrecision):
            raise MisconfigurationException(
                f"{type(self).__name__} switches the phase of a LowBitPrecision plugin, but the Trainer has "
                f"{type(trainer.precision_plugin).__name__}. Use e.g. Trainer(plugins=[FP4Precision()])."
            )
        self._due, self._done = self._resolve(trainer, pl_module), False
        alike = [switch for switch in self._switches(trainer) if switch.to == self.to]
        early = all(trainer.global_step < switch._resolve(trainer, pl_module) for switch in alike)
        if trainer.precision_plugin.phase == self.to != "fqt" and early:
            rank_zero_warn(
                f"The run is in phase {self.to!r} already, as its checkpoint was, though {type(self).__name__} is due "
                f"at step {self._due}; it stays so. PrecisionSwitch('fqt', step={trainer.global_step}) goes back."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Switches when it is time.

        ``global_step`` changes at accumulation boundaries only and alike on all ranks, and so does the phase.
        """
        if self._done or trainer.global_step < self._due:
            return
        self._done = True  # once: whoever changes the phase later has the last word
        plugin = trainer.precision_plugin
        assert isinstance(plugin, LowBitPrecision)
        if plugin.phase != self.to and self._is_last_due(trainer):
            rank_zero_info(f"Step {trainer.global_step}: precision phase {plugin.phase!r} -> {self.to!r}.")
            plugin.set_phase(self.to)
            for logger in trainer.loggers:
                logger.log_metrics({"phase": float(list(PHASES).index(self.to))}, step=trainer.global_step)

    @staticmethod
    def _switches(trainer: Trainer) -> "list[PrecisionSwitch]":
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        return [callback for callback in callbacks if isinstance(callback, PrecisionSwitch)]

    def _is_last_due(self, trainer: Trainer) -> bool:
        due = [switch for switch in self._switches(trainer) if switch._due <= trainer.global_step]
        return max(reversed(due), key=lambda switch: switch._due) is self  # of equals, the one listed last

    def _resolve(self, trainer: Trainer, pl_module: LightningModule) -> int:
        if self.step is not None:
            return self.step
        assert self.at is not None
        if not pl_module.automatic_optimization and trainer.max_steps == -1:
            raise MisconfigurationException(
                f"{type(self).__name__}(at={self.at}) is a fraction of all optimizer steps, and how many manual "
                "optimisation takes is not known: set max_steps, or give step instead of at."
            )
        total = trainer.estimated_stepping_batches
        if total == float("inf"):
            raise MisconfigurationException(
                f"{type(self).__name__}(at={self.at}) is a fraction of all steps, and this run has no end: set "
                "max_steps or max_epochs, or give step instead of at."
            )
        return round(self.at * total)


class QAFSwitch(PrecisionSwitch):
    """Quantisation-aware finetuning: from a step on the forward pass stays quantised and the backward pass computes in
    high precision (FP4 All the Way, arXiv 2505.19115, section 4).

    Args:
        at: when, as a fraction of all optimizer steps.
        step: when, as a number of optimizer steps; instead of ``at``.

    Example:
        >>> Trainer(plugins=[FP4Precision("nvfp4")], callbacks=[QAFSwitch(at=0.9)])
    """

    def __init__(self, *, at: float | None = None, step: int | None = None) -> None:
        super().__init__("qaf", at=at, step=step)
