"""The base class of callbacks that change something during training, at a step that a trigger gives."""

import math
from collections.abc import Callable
from typing import Any

from lightning_lowbit._lightning import (
    LightningModule,
    Trainer,
    is_validation_of_fit,
    rank_zero_info,
    rank_zero_warn,
    say_once,
    total_steps,
)
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.switches.metric_triggers import AtBelow, AtPlateau, Below, Plateau
from lightning_lowbit.callbacks.switches.step_triggers import AtFraction, AtStep, AtTokens, Trigger
from lightning_lowbit.saved_state import check_state

__all__ = ["Below", "Plateau", "Switch"]

_CHECKPOINT_KEY = "lightning_lowbit_switches"


class Switch(LowBitCallback):
    """Changes something before the first micro-batch of an optimizer step, or gradually from that step on.

    Switches of the same thing conflict: the last one due wins, and of several due at the same step, the last in the
    list; switches that compose all act, each at its time. Each acts once per process: later changes by hand stay.

    A subclass sets :attr:`changes`, implements :meth:`begin`, :meth:`proceed` or both, and keeps its arguments as
    attributes of the same names.

    Args:
        count: returns the tokens of a batch, for ``tokens``.
        when: some of ``at``, ``step``, ``tokens``, ``plateau`` and ``below``, exactly one of them not None.
    """

    changes: str  # switches of the same thing conflict
    composes: bool = False  # conflicting switches all act in turn, not only the last

    def __init__(self, count: Callable[[Any], int] | None = None, **when: Any) -> None:
        self.at: float | None = when.get("at")
        self.step: int | None = when.get("step")
        self.tokens: int | None = when.get("tokens")
        self.count = count
        self._trigger = _trigger_of(count, **when)
        self.plateau = self._trigger.plateau if isinstance(self._trigger, AtPlateau) else None
        self.below = self._trigger.below if isinstance(self._trigger, AtBelow) else None
        self._conflicting: list[Any] = []  # switches with the same `changes`, including this one
        self._looked: int | None = None  # the last step for which the trigger was asked
        self._acted: int | None = None  # the last step at which it acted
        self._done = False
        self._is_too_late = False  # for this run, as it has been told

    def _start_afresh(self) -> None:
        self._trigger.start_afresh()

    @property
    def _due(self) -> float:
        return self._trigger.due

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the change that happens once."""

    def proceed(self, trainer: Trainer, pl_module: LightningModule, steps: int) -> bool:
        """Makes the change of each step, ``steps`` after the first; returns True after the last."""
        return True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._conflicting = [
            other for other in callbacks if isinstance(other, Switch) and other.changes == self.changes
        ]
        due, total = self._resolve(trainer, pl_module), total_steps(trainer)
        # Manual optimization may take more steps than there are batches.
        self._is_too_late = self._trigger.is_known and pl_module.automatic_optimization and due >= total
        if self._is_too_late:
            say_once(
                f"{type(self).__name__}({self._trigger.why()}) is due at step {due:g} and will not act: this run "
                f"ends at step {total:g}."
            )
        self._looked, self._acted, self._done = None, None, False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_validation_of_fit(trainer):
            self._trigger.after_validation(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        for switch in self._conflicting:  # all of them, to find the last one that is due
            if switch._looked != trainer.global_step:
                switch._looked = trainer.global_step
                switch._trigger.look(trainer)
        self._trigger.see(trainer, batch)
        due = [switch for switch in self._conflicting if switch._due <= trainer.global_step]
        if self._done or self not in due:
            return
        due.sort(key=lambda switch: switch._due)  # stable: of switches at one step, the last in the list wins
        if self.composes:
            for switch in due:
                switch._act(trainer, pl_module)
        elif due[-1] is self:
            self._act(trainer, pl_module)
        else:
            self._done = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns if nothing counts the steps, which a switch of any trigger waits for."""
        if trainer.global_step == 0 and not pl_module.automatic_optimization and self is self._conflicting[0]:
            rank_zero_warn(
                f"{type(self).__name__} goes by trainer.global_step, which is still 0 after an epoch: Lightning counts "
                "the steps of self.optimizers(), but not those of raw optimizers (use_pl_optimizer=False)."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says so if the switch was not due, as in a run that ends early, or whose metric does not get there."""
        if self._due >= trainer.global_step > 0 and not self._is_too_late:
            when = next(f"{name}={value!r}" for name in _TRIGGERS if (value := getattr(self, name, None)) is not None)
            due = f" and it is due at step {self._due:g}" if self._due < math.inf else ""
            rank_zero_info(
                f"{type(self).__name__}({when}) has not acted: training ended at step {trainer.global_step}{due}."
            )

    def _act(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._done or self._acted == trainer.global_step:
            return
        if self._acted is None:
            self.begin(trainer, pl_module)
        self._acted = trainer.global_step
        self._done = self.proceed(trainer, pl_module, self._acted - int(self._due))

    @property
    def state_key(self) -> str:
        names = ("to", "at", "step", "tokens", "plateau", "below")
        return self._generate_state_key(**{name: getattr(self, name, None) for name in names})

    # Not in `state_dict`: Lightning raises if two callbacks have states under one key, and a config overlay may repeat
    # a switch of the recipe. Equal switches share one state.

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the state; all ranks must call this."""
        if state := self._state(trainer):
            checkpoint.setdefault(_CHECKPOINT_KEY, {})[self.state_key] = state

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Loads the state and resets the rest: the same Trainer may have trained further before."""
        owner, states = type(self).__name__, checkpoint.get(_CHECKPOINT_KEY, {})
        check_state(owner, states, {str: {}})
        if state := states.get(self.state_key):
            check_state(owner, state, self._trigger.saved | self.saved)
        self._start_afresh()
        if state:
            self._load(state)

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        return self._trigger.state_dict(trainer)

    def _load(self, state: dict[str, Any]) -> None:
        self._trigger.load_state_dict(state)

    def _resolve(self, trainer: Trainer, pl_module: LightningModule) -> float:
        self._trigger.begin(type(self).__name__, trainer, pl_module)
        return self._due


# Triggers by argument, with descriptions for error messages.
_TRIGGERS: dict[str, tuple[Callable[[Any], Trigger], str]] = {
    "at": (AtFraction, "a fraction of all steps"),
    "step": (AtStep, "a number"),
    "tokens": (AtTokens, "how many to train on first"),
    "plateau": (AtPlateau, "of a validation metric"),
    "below": (AtBelow, "a threshold of a measured metric"),
}


def _trigger_of(count: Callable[[Any], int] | None = None, **arguments: Any) -> Trigger:
    chosen = {name: value for name, value in arguments.items() if value is not None}
    if len(chosen) != 1:
        *first, last = (f"{name} ({_TRIGGERS[name][1]})" for name in arguments)
        got = ", ".join(f"{name}={value!r}" for name, value in (chosen or arguments).items())
        raise ValueError(f"Give either {', '.join(first)} or {last}; got {got}.")
    ((name, value),) = chosen.items()
    if count is not None and name != "tokens":
        raise ValueError("count counts the tokens of a batch, for tokens alone: give tokens, or leave out count.")
    if count is not None and not callable(count):
        raise ValueError(f"count takes a batch and gives the number of its tokens; got {count!r}.")
    return AtTokens(value, count) if name == "tokens" else _TRIGGERS[name][0](value)
