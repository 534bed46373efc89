"""Callbacks that change something in mid-training: when they act, and which of several has the last word.

Switches follow ``global_step``, which counts optimizer steps, alike on all ranks, and does not change between
micro-batches. A trigger says when a switch is due, see :mod:`lightning_lowbit.callbacks.switches.step_triggers`.
"""

from collections.abc import Callable
from typing import Any

from lightning_lowbit._lightning import LightningModule, Trainer
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.switches.metric_triggers import AtBelow, AtPlateau, Below, Plateau
from lightning_lowbit.callbacks.switches.step_triggers import AtFraction, AtStep, AtTokens, Trigger

__all__ = ["Below", "Plateau", "Switch"]

_CHECKPOINT_KEY = "lightning_lowbit_switches"


class Switch(LowBitCallback):
    """Changes something before the first micro-batch of an optimizer step, or step by step from there on.

    Switches of the same thing conflict: the last one that is due holds, and of several at one step the last in the
    list. Those that compose all act, each at its time. Each acts once in a process: what is changed by hand afterwards
    stays, until a run is resumed.

    A subclass says what it :attr:`changes`, changes it in :meth:`begin`, :meth:`proceed` or both, and keeps its
    arguments as attributes of the same names.

    Args:
        count: the tokens of a batch, for ``tokens``.
        when: some of ``at``, ``step``, ``tokens``, ``plateau`` and ``below``, of which one is not None.

    Attributes:
        changes: what; switches of the same thing conflict.
        composes: whether conflicting switches that are due act one after the other, not the last one alone.

    Raises:
        ValueError: not exactly one of those in ``when`` is given, or one out of range.
        MisconfigurationException: when training starts, or later: the run does not have what the trigger needs.
    """

    changes: str
    composes: bool = False

    def __init__(self, count: Callable[[Any], int] | None = None, **when: Any) -> None:
        self.at: float | None = when.get("at")
        self.step: int | None = when.get("step")
        self.tokens: int | None = when.get("tokens")
        self.count = count
        self._trigger = _trigger_of(count, **when)
        self.plateau = self._trigger.plateau if isinstance(self._trigger, AtPlateau) else None
        self.below = self._trigger.below if isinstance(self._trigger, AtBelow) else None
        self._conflicting: list[Any] = []  # the switches of the same thing, this one among them
        self._looked: int | None = None  # the last step before which the trigger was asked
        self._acted: int | None = None  # the last step at which it did something
        self._done = False

    def _start_afresh(self) -> None:
        self._trigger.start_afresh()

    @property
    def _due(self) -> float:
        return self._trigger.due

    # --- what ---

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Changes what is changed once."""

    def proceed(self, trainer: Trainer, pl_module: LightningModule, steps: int) -> bool:
        """Changes what is changed at each step, ``steps`` after the first; returns whether this was the last."""
        return True

    # --- when ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets another run."""
        super().setup(trainer, pl_module, stage)
        if trainer.global_step == 0:  # or else the same Trainer goes on; a checkpoint is loaded after this
            self._start_afresh()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds conflicting switches; checks that the run has what the trigger needs."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._conflicting = [each for each in callbacks if isinstance(each, Switch) and each.changes == self.changes]
        self._resolve(trainer, pl_module)
        self._looked, self._acted, self._done = None, None, False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks for a plateau."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._trigger.after_validation(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Acts when it is time."""
        for switch in self._conflicting:  # all of them, so that the last one is known
            switch._look(trainer)
        self._trigger.see(trainer, batch)
        due = [switch for switch in self._conflicting if switch._due <= trainer.global_step]
        if self._done or self not in due:
            return
        due.sort(key=lambda switch: switch._due)  # of equals, the one listed last stays last
        if self.composes:
            for switch in due:
                switch._act(trainer, pl_module)
        elif due[-1] is self:
            self._act(trainer, pl_module)
        else:
            self._done = True

    def _look(self, trainer: Trainer) -> None:
        if self._looked != trainer.global_step:
            self._looked = trainer.global_step
            self._trigger.look(trainer)

    def _act(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        if self._done or step == self._acted:
            return
        if self._acted is None:
            self.begin(trainer, pl_module)
        self._acted = step
        self._done = self.proceed(trainer, pl_module, step - int(self._due))

    @property
    def state_key(self) -> str:
        """Tells several switches of one Trainer apart by their arguments."""
        names = ("to", "at", "step", "tokens", "plateau", "below")
        return self._generate_state_key(**{name: getattr(self, name, None) for name in names})

    # Not in `state_dict`: Lightning refuses two callbacks with states under one key, and an overlay may repeat a switch
    # of the recipe. Two that are the same have one state.

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the state; all ranks take part."""
        if state := self._state(trainer):
            checkpoint.setdefault(_CHECKPOINT_KEY, {})[self.state_key] = state

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes the state, and forgets all else: the same Trainer may have trained further before."""
        self._start_afresh()
        if state := checkpoint.get(_CHECKPOINT_KEY, {}).get(self.state_key):
            self._load_state(state)

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        return self._trigger.state_dict(trainer)

    def _load_state(self, state: dict[str, Any]) -> None:
        if "due" in state:
            self._trigger.load_state_dict(state)

    def _resolve(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """The step at which it is due; infinity while that is not known."""
        self._trigger.begin(type(self).__name__, trainer, pl_module)
        return self._due


# What each argument says, for messages.
_ARGUMENTS = {
    "at": "at (a fraction of all steps)",
    "step": "step (a number)",
    "tokens": "tokens (how many to train on first)",
    "plateau": "plateau (of a validation metric)",
    "below": "below (a threshold of a measured metric)",
}


def _trigger_of(count: Callable[[Any], int] | None = None, **arguments: Any) -> Trigger:
    """The trigger of the one argument that is not None.

    Raises:
        ValueError: not exactly one is given, or one out of range.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if len(given) != 1:
        *first, last = (_ARGUMENTS[name] for name in arguments)
        raise ValueError(
            f"Give either {', '.join(first)} or {last}; got "
            f"{', '.join(f'{name}={value!r}' for name, value in (given or arguments).items())}."
        )
    if count is not None and "tokens" not in given:
        raise ValueError("count counts the tokens of a batch, for tokens alone: give tokens, or leave out count.")
    if count is not None and not callable(count):
        raise ValueError(f"count takes a batch and gives the number of its tokens; got {count!r}.")
    ((name, value),) = given.items()
    kinds: dict[str, Callable[[Any], Trigger]] = {
        "at": AtFraction,
        "step": AtStep,
        "tokens": lambda tokens: AtTokens(tokens, count),
        "plateau": AtPlateau,
        "below": AtBelow,
    }
    return kinds[name](value)
