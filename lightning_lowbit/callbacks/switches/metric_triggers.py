"""Triggers that follow a metric.

    plateau    of a validation's: it has not improved for a while
    below      of one that a callback measures in training: it has been small for a while

Neither is known when training starts, so that what it has seen is part of a checkpoint.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_lowbit._lightning import LightningModule, MisconfigurationException, Trainer, is_mid_step
from lightning_lowbit.callbacks.switches.trigger import Trigger
from lightning_lowbit.quant.cast import choose, from_fields, is_number


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


class AtPlateau(Trigger):
    """A plateau of a metric."""

    def __init__(self, plateau: Plateau | Mapping[str, Any]) -> None:
        super().__init__()
        self.plateau = from_fields(Plateau, "a plateau", plateau) if isinstance(plateau, Mapping) else plateau
        if not isinstance(self.plateau, Plateau):
            raise ValueError(f"plateau is a Plateau or a mapping such as {{'monitor': 'val_loss'}}; got {plateau!r}.")

    def start_afresh(self) -> None:
        """Forgets what was seen."""
        super().start_afresh()
        self._best: float | None = None
        self._stalled = 0  # validations without an improvement

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Needs validations."""
        if not trainer.enable_validation:
            raise MisconfigurationException(
                f"{owner}(plateau=...) waits for validations, and this run has none: give the module a "
                "validation_step and its data, or give at or step instead of plateau."
            )

    def after_validation(self, trainer: Trainer) -> None:
        """Looks for a plateau; after one it is due at the next optimizer step that begins."""
        if self.due < math.inf:
            return
        value = self.plateau.read(trainer)
        if self.plateau.improves(value, self._best):
            self._best, self._stalled = value, 0
        else:
            self._stalled += 1
        if trainer.strategy.reduce_boolean_decision(self._stalled >= self.plateau.patience, all=False):
            self.due = trainer.global_step + is_mid_step(trainer)

    def why(self) -> str:
        """What was not improved on."""
        best = "none" if self._best is None else f"{self._best:.6g}"
        return f"plateau of {self.plateau.monitor}, best {best}, {self._stalled} validations without an improvement"

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """What has been seen so far."""
        return {"due": self.due, "best": self._best, "stalled": self._stalled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with it."""
        self.due, self._best, self._stalled = (state[name] for name in ("due", "best", "stalled"))


@dataclass(frozen=True)
class Below:
    """Several measurements in a row of a metric that are below a threshold; NaN never is.

    By default, how far the gradient stands out from the noise of quantization: below √3 noise takes over (FP4 All the
    Way, arXiv 2505.19115, section 4).

    Measurements come from a callback of the Trainer, such as ``GradientNoiseMonitor``, by its method
    ``measurements(monitor) -> Sequence[tuple[int, float]]``: optimizer steps, counted from 1, and values that the host
    knows, oldest first, and a ``KeyError`` for a metric that it does not have. Steps are the same on all ranks; of
    different values, one that is below is enough. The host knows the value of the i-th step once
    ``on_train_batch_start`` of the next one is over. It is looked at before the step after that, the (i + 2)-th, once
    ``global_step`` is i + 1: one step later than might be, and so at the same step in whatever order callbacks are, and
    in a resumed run.

    Args:
        monitor: the metric's name.
        threshold: what the metric is below; finite.
        measurements: how many in a row, at least 1.

    Raises:
        ValueError: an argument is not one of the above.
    """

    monitor: str = "gradient_noise/ratio"
    threshold: float = math.sqrt(3)
    measurements: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str) or not self.monitor:
            raise ValueError(f"monitor is the name of a metric that a callback measures; got {self.monitor!r}.")
        if not is_number(self.threshold) or not math.isfinite(self.threshold):
            raise ValueError(f"threshold is what the metric is below, a finite number; got {self.threshold!r}.")
        if type(self.measurements) is not int or self.measurements < 1:
            raise ValueError(f"measurements is how many in a row, 1 or more; got {self.measurements!r}.")


class AtBelow(Trigger):
    """A metric that is below a threshold."""

    def __init__(self, below: Below | Mapping[str, Any]) -> None:
        super().__init__()
        self.below = from_fields(Below, "below", below) if isinstance(below, Mapping) else below
        if not isinstance(self.below, Below):
            raise ValueError(f"below is a Below or a mapping such as {{'measurements': 3}}; got {below!r}.")

    def start_afresh(self) -> None:
        """Forgets what was seen."""
        super().start_afresh()
        self._in_a_row = 0
        self._value = math.nan  # the last one that was looked at
        self._seen = -1  # the step of it
        self._waiting: list[tuple[int, float]] = []  # measured, by a checkpoint, and not looked at yet
        self._source: Any = None

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the callback that measures."""
        monitor, offered = self.below.monitor, []
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if callable(getattr(callback, "measurements", None)):
                try:
                    callback.measurements(monitor)
                except KeyError as error:
                    offered.append(f"{type(callback).__name__} does not ({error.args[0] if error.args else monitor})")
                    continue
                self._source = callback
                return
        there = "; ".join(offered) or f"no callback of {len(callbacks)} measures anything"
        raise MisconfigurationException(
            f"{owner}(below=...) waits for measurements of {monitor!r}, which no callback of the Trainer offers: "
            f"{there}. Add GradientNoiseMonitor(), which measures 'gradient_noise/ratio', to the callbacks, or name "
            "another monitor."
        )

    def _news(self) -> list[tuple[int, float]]:
        """Measurements that were not looked at, oldest first."""
        found = {step: value for step, value in self._waiting if step > self._seen}
        measured: Sequence[tuple[int, float]] = (
            [] if self._source is None else self._source.measurements(self.below.monitor)
        )
        for step, value in reversed(measured):
            if step <= self._seen:
                break
            found[step] = value
        return sorted(found.items())

    def look(self, trainer: Trainer) -> None:
        """Counts those that are below."""
        if self.due < math.inf:
            return
        for step, value in self._news():
            if step >= trainer.global_step:  # callbacks that come later in the list do not know it yet
                break
            self._seen, self._value = step, value
            is_below = trainer.strategy.reduce_boolean_decision(value < self.below.threshold, all=False)
            self._in_a_row = self._in_a_row + 1 if is_below else 0
            if self._in_a_row >= self.below.measurements:
                self.due = trainer.global_step
                break

    def why(self) -> str:
        """The last measurement."""
        below = self.below
        return f"{below.monitor} {self._value:.6g} below {below.threshold:.6g}, {below.measurements} in a row"

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """What has been looked at, and what is still to be: a measuring callback may not keep it."""
        state = {"due": self.due, "in_a_row": self._in_a_row, "value": self._value, "seen": self._seen}
        return {**state, "waiting": self._news() if self.due == math.inf else []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with it."""
        self.due, self._in_a_row, self._value, self._seen = (
            state[name] for name in ("due", "in_a_row", "value", "seen")
        )
        self._waiting = [(step, value) for step, value in state["waiting"]]
