"""When callbacks change something in mid-training, and which of several has the last word.

    at=0.5, step=500    known when training starts, so that a resumed run needs no state
    plateau             known once validation has not improved for a while

``global_step`` counts optimizer steps, changes at accumulation boundaries only and alike on all ranks. So do switches.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_lowbit.quant.cast import choose, from_fields, is_number

_CHECKPOINT_KEY = "lightning_lowbit_switches"


@dataclass(frozen=True)
class Plateau:
    """Several validations in a row in which a metric did not improve; those of sanity checks do not count.

    How many there were is part of a checkpoint. (One from between a step and the validation after it loses this
    validation: Lightning leaves it out in the resumed run.)

    Args:
        monitor: the metric's name in ``trainer.callback_metrics``. Log it with ``sync_dist=True``: of processes with
            different values, one that sees a plateau is enough.
        patience: how many validations, at least 1.
        min_delta: an improvement is larger than this; at least 0.
        mode: ``"min"``: smaller is better; or ``"max"``.

    Raises:
        ValueError: an argument is not one of the above.
    """

    monitor: str = "val_loss"
    patience: int = 5
    min_delta: float = 0.0
    mode: str = "min"

    def __post_init__(self) -> None:
        choose("mode of a plateau", self.mode, ("min", "max"))
        if type(self.patience) is not int or self.patience < 1:
            raise ValueError(f"patience is a number of validations, 1 or more; got {self.patience!r}.")
        if not is_number(self.min_delta) or not 0 <= self.min_delta < math.inf:
            raise ValueError(f"min_delta is what an improvement exceeds, 0 or more; got {self.min_delta!r}.")

    def read(self, trainer: Trainer) -> float:
        """The metric after a validation."""
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise MisconfigurationException(
                f"A switch at a plateau of {self.monitor!r} finds no such metric after a validation, but "
                f"{', '.join(map(repr, metrics)) or 'none at all'}. Log it in validation_step, or name another monitor."
            )
        return float(metrics[self.monitor])

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best before it (None: there is none); one that is not finite never is."""
        if not math.isfinite(value) or best is None:
            return math.isfinite(value)
        return (best - value if self.mode == "min" else value - best) > self.min_delta


class Switch(Callback):
    """Changes something before the first micro-batch of an optimizer step, or step by step from there on.

    Of several switches of the same thing the last one that is due holds, and of several at one step the last in the
    list. Each acts once in a process: what is changed by hand afterwards stays so, until a run is resumed.

    A subclass says what it :attr:`changes`, changes it in :meth:`begin`, :meth:`proceed` or both, and keeps its
    arguments as attributes of the same names.

    Args:
        at: when, as a fraction of all optimizer steps, in [0, 1].
        step: when, as a number of optimizer steps; instead of ``at``.
        plateau: when, after a plateau of a metric, or its fields; instead of ``at`` and ``step``.

    Attributes:
        changes: what; switches of the same thing are rivals.

    Raises:
        ValueError: not exactly one of ``at``, ``step`` and ``plateau``, or one out of range.
        MisconfigurationException: when training starts: a fraction is asked for of a run whose number of steps is not
            known, or a plateau of one without validation; or after a validation: the metric is not there.
    """

    changes: ClassVar[str]

    def __init__(self, at: float | None, step: int | None, plateau: Plateau | Mapping[str, Any] | None = None) -> None:
        if plateau is None and (at is None) == (step is None):
            raise ValueError(f"Give either at (a fraction of all steps) or step (a number); got at={at}, step={step}.")
        if plateau is not None and (at, step) != (None, None):
            raise ValueError(f"Give plateau, or at, or step, each of which says when; got {plateau=}, {at=}, {step=}.")
        if at is not None and (not is_number(at) or not 0 <= at <= 1):
            raise ValueError(f"at is a fraction of all optimizer steps, between 0 and 1; got {at!r}.")
        if step is not None and (type(step) is not int or step < 0):
            raise ValueError(f"step is a number of optimizer steps, 0 or more; got {step!r}.")
        self.at, self.step = at, step
        self.plateau = from_fields(Plateau, "a plateau", plateau) if isinstance(plateau, Mapping) else plateau
        if not isinstance(self.plateau, Plateau | None):
            raise ValueError(f"plateau is a Plateau or a mapping such as {{'monitor': 'val_loss'}}; got {plateau!r}.")
        self._acted: int | None = None  # the last step at which it did something
        self._done = False
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._due: float = math.inf
        self._best: float | None = None
        self._stalled = 0  # validations without an improvement

    # --- what ---

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Does what is done once."""

    def proceed(self, trainer: Trainer, pl_module: LightningModule, steps: int) -> bool:
        """Does what is done at each step, ``steps`` of them after the first; returns whether this was the last."""
        return True

    # --- when ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets the plateau of another run."""
        if trainer.global_step == 0:  # or else the same Trainer goes on; a checkpoint is loaded after this
            self._start_afresh()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resolves the fraction."""
        if self.plateau is not None and not trainer.enable_validation:
            raise MisconfigurationException(
                f"{type(self).__name__}(plateau=...) waits for validations, and this run has none: give the module a "
                "validation_step and its data, or give at or step instead of plateau."
            )
        self._due, self._acted, self._done = self._resolve(trainer, pl_module), None, False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks for a plateau; after one it is due at the next optimizer step that begins."""
        plateau = self.plateau
        if plateau is None or self._due < math.inf or trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        value = plateau.read(trainer)
        if plateau.improves(value, self._best):
            self._best, self._stalled = value, 0
        else:
            self._stalled += 1
        if trainer.strategy.reduce_boolean_decision(self._stalled >= plateau.patience, all=False):
            self._due = trainer.global_step + trainer.fit_loop._should_accumulate()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Acts when it is time."""
        step = trainer.global_step
        if self._done or step < self._due or step == self._acted:
            return
        if not self._is_last_due(trainer):
            self._done = True
            return
        if self._acted is None:
            self.begin(trainer, pl_module)
        self._acted = step
        self._done = self.proceed(trainer, pl_module, step - int(self._due))

    @property
    def state_key(self) -> str:
        """Tells several switches of one Trainer apart, by what they wait for, and for what."""
        return self._generate_state_key(**{name: getattr(self, name, None) for name in ("to", "at", "step", "plateau")})

    # Not in `state_dict`: Lightning refuses two callbacks with states under one key, and an overlay may well repeat a
    # switch of the recipe's. Two that are the same have one state.

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds what of a plateau has been seen so far."""
        if self.plateau is not None:
            seen = {"due": self._due, "best": self._best, "stalled": self._stalled}
            checkpoint.setdefault(_CHECKPOINT_KEY, {})[self.state_key] = seen

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Goes on with it."""
        seen = checkpoint.get(_CHECKPOINT_KEY, {}).get(self.state_key)
        if seen is not None:
            self._due, self._best, self._stalled = (seen[name] for name in ("due", "best", "stalled"))

    def _rivals(self, trainer: Trainer) -> list[Any]:
        """The switches of the same thing, this one among them."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        return [switch for switch in callbacks if isinstance(switch, Switch) and switch.changes == self.changes]

    def _is_last_due(self, trainer: Trainer) -> bool:
        due = [switch for switch in self._rivals(trainer) if switch._due <= trainer.global_step]
        return max(reversed(due), key=lambda switch: switch._due) is self  # of equals, the one listed last

    def _resolve(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """The step at which it is due; infinity while there was no plateau."""
        if self.plateau is not None:
            return self._due
        return self._in_steps("at", "step", trainer, pl_module)

    def _in_steps(self, fraction: str, number: str, trainer: Trainer, pl_module: LightningModule) -> int:
        """Of two arguments the one that is a number of steps, or else the one that is a fraction of all of them."""
        steps, share = getattr(self, number), getattr(self, fraction)
        if steps is not None:
            return steps
        if not pl_module.automatic_optimization and trainer.max_steps == -1:
            raise MisconfigurationException(
                f"{type(self).__name__}({fraction}={share}) is a fraction of all optimizer steps, and how many manual "
                f"optimisation takes is not known: set max_steps, or give {number} instead of {fraction}."
            )
        total = trainer.estimated_stepping_batches
        if total == math.inf:
            raise MisconfigurationException(
                f"{type(self).__name__}({fraction}={share}) is a fraction of all steps, and this run has no end: set "
                f"max_steps or max_epochs, or give {number} instead of {fraction}."
            )
        return round(share * total)
