"""Changing the weight decay in mid-training."""

import math
from typing import Any

from lightning_lowbit._lightning import LightningModule, MisconfigurationException, Trainer, rank_zero_info
from lightning_lowbit.callbacks.switches.base import Switch
from lightning_lowbit.checks import is_number

# What a group began with, also after a switch to 0 and a resume: as torch's schedulers keep "initial_lr".
_INITIAL = "initial_weight_decay"


class WeightDecaySwitch(Switch):
    """Sets the weight decay of all optimizers from a step on; parameters that have none before keep having none.

    Ternary weights flip as long as the weights behind them are small, which weight decay sees to, and settle once it is
    gone: "The Era of 1-bit LLMs: Training Tips, Code and FAQ" (in the repository microsoft/unilm) goes from 0.1 to 0
    half-way, where the learning rate drops, too.

    The switch happens before the first micro-batch of that optimizer step. Of several switches, the last one that is
    due holds. The weight decay in force is part of the optimizers' checkpoint; this callback has no state.

    Args:
        to: the weight decay from then on, at least 0.
        at: when, as a fraction of all optimizer steps, in [0, 1].
        step: when, as a number of optimizer steps; instead of ``at``.

    Raises:
        ValueError: ``to`` is negative or not finite, or not exactly one of ``at`` and ``step`` is given, or one out of
            range.
        MisconfigurationException: when training starts: an optimizer has no weight decay, or a fraction is asked for of
            a run whose number of steps is not known.

    Example:
        >>> Trainer(plugins=[TernaryPrecision()], callbacks=[WeightDecaySwitch(at=0.5)])
    """

    changes = "weight decay"

    def __init__(self, to: float = 0.0, *, at: float | None = None, step: int | None = None) -> None:
        if not is_number(to) or not 0 <= to < math.inf:
            raise ValueError(f"to is a weight decay, 0 or more; got {to!r}.")
        super().__init__(at=at, step=step)
        self.to = to

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resolves the fraction."""
        for optimizer in trainer.optimizers:
            if not any("weight_decay" in group for group in optimizer.param_groups):
                raise MisconfigurationException(
                    f"{type(self).__name__} sets the weight decay of optimizers, and {type(optimizer).__name__} has "
                    "none in its parameter groups. Use one that has, such as AdamW, or leave out the callback."
                )
        for group in _groups(trainer):
            if "weight_decay" in group:
                group.setdefault(_INITIAL, group["weight_decay"])
        if not any(group.get(_INITIAL) for group in _groups(trainer)):
            raise MisconfigurationException(
                f"{type(self).__name__} changes the weight decay of parameters that have one, and here it is 0 for "
                "all. Give the optimizer a weight decay, or leave out the callback."
            )
        super().on_train_start(trainer, pl_module)

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets it."""
        decaying = [group for group in _groups(trainer) if group.get(_INITIAL)]
        before = sorted({group["weight_decay"] for group in decaying} - {self.to})
        if before:
            rank_zero_info(f"Step {trainer.global_step}: weight decay {', '.join(map(str, before))} -> {self.to}.")
        for group in decaying:
            group["weight_decay"] = self.to


def _groups(trainer: Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
