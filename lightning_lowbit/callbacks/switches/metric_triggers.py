"""Triggers by metrics: one of validation stops improving, or one measured in training stays below a threshold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_lowbit._lightning import LightningModule, MisconfigurationException, Trainer, is_mid_step
from lightning_lowbit.callbacks.switches.step_triggers import Trigger
from lightning_lowbit.checks import choose, from_fields, integer, number, text
from lightning_lowbit.saved_state import NUMBER, count


@dataclass(frozen=True)
class Plateau:
    """A number of validations in a row without improvement of a metric; sanity checks do not count.

    Checkpoints save the number. Lightning skips the validation of a run that is resumed just before it.

    Args:
        monitor: name in ``trainer.callback_metrics``. Log it with ``sync_dist=True``: if ranks have different values, a
            plateau on one of them is enough.
        patience: number of validations, at least 1.
        min_delta: improvements must exceed it; at least 0.
        mode: ``"min"`` if smaller is better, or ``"max"``.

    Examples:
        >>> QAFSwitch(plateau=Plateau("val_loss", patience=3))
    """

    monitor: str = "val_loss"
    patience: int = 5
    min_delta: float = 0.0
    mode: str = "min"

    def __post_init__(self) -> None:
        text("monitor", self.monitor, "the name of a metric that validation logs")
        choose("mode of a plateau", self.mode, ("min", "max"))
        integer("patience", self.patience, 1, "a number of validations")
        number("min_delta", self.min_delta, "what an improvement exceeds", at_least=0)

    def read(self, trainer: Trainer) -> float:
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise MisconfigurationException(
                f"A switch at a plateau of {self.monitor!r} finds no such metric after a validation, but "
                f"{', '.join(map(repr, metrics)) or 'none at all'}. Log it in validation_step, or name another monitor."
            )
        return float(metrics[self.monitor])

    def improves(self, value: float, best: float | None) -> bool:
        """Tells whether a value is better than the best so far; non-finite values never are."""
        if not math.isfinite(value) or best is None:
            return math.isfinite(value)
        return (best - value if self.mode == "min" else value - best) > self.min_delta


class AtPlateau(Trigger):
    saved: ClassVar[dict[Any, Any]] = {"due": NUMBER, "best": NUMBER | None, "stalled": count}

    def __init__(self, plateau: Plateau | Mapping[str, Any]) -> None:
        super().__init__()
        self.plateau = from_fields(Plateau, "a plateau", plateau) if isinstance(plateau, Mapping) else plateau
        if not isinstance(self.plateau, Plateau):
            raise ValueError(f"plateau is a Plateau or a mapping such as {{'monitor': 'val_loss'}}; got {plateau!r}.")

    def start_afresh(self) -> None:
        super().start_afresh()
        self.best: float | None = None
        self.stalled = 0  # validations without an improvement

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.enable_validation:
            raise MisconfigurationException(
                f"{owner}(plateau=...) waits for validations, and this run has none: give the module a "
                "validation_step and its data, or give at or step instead of plateau."
            )

    def after_validation(self, trainer: Trainer) -> None:
        if self.due < math.inf:
            return
        value = self.plateau.read(trainer)
        if self.plateau.improves(value, self.best):
            self.best, self.stalled = value, 0
        else:
            self.stalled += 1
        if trainer.strategy.reduce_boolean_decision(self.stalled >= self.plateau.patience, all=False):
            self.due = trainer.global_step + is_mid_step(trainer)

    def why(self) -> str:
        best = "none" if self.best is None else f"{self.best:.6g}"
        return f"plateau of {self.plateau.monitor}, best {best}, {self.stalled} validations without an improvement"


@dataclass(frozen=True)
class Below:
    """A number of consecutive measurements of a metric below a threshold; NaN is never below.

    The default is the ratio of gradient to quantization noise: below √3, noise dominates (FP4 All the Way, arXiv
    2505.19115, section 4).

    A callback of the Trainer, such as ``GradientNoiseMonitor``, must offer the metric by a method
    ``measurements(monitor) -> Sequence[tuple[int, float]]``: optimizer steps from 1, the same on all ranks, and values
    on the host, oldest first; ``KeyError`` for other metrics. If values differ between ranks, one below is enough. The
    measurement of step i is known after ``on_train_batch_start`` of step i + 1, and used before step i + 2.

    Args:
        monitor: the metric's name.
        threshold: a finite number.
        measurements: how many in a row, at least 1.

    Examples:
        >>> QAFSwitch(below=Below("gradient_noise/ratio", measurements=5))
    """

    monitor: str = "gradient_noise/ratio"
    threshold: float = math.sqrt(3)
    measurements: int = 3

    def __post_init__(self) -> None:
        text("monitor", self.monitor, "the name of a metric that a callback measures")
        number("threshold", self.threshold, "what the metric is below, a finite number")
        integer("measurements", self.measurements, 1, "how many in a row")


class AtBelow(Trigger):
    saved: ClassVar[dict[Any, Any]] = {
        "due": NUMBER,
        "in_a_row": count,
        "value": NUMBER,
        "seen": int,
        "waiting": [(int, NUMBER)],
    }

    def __init__(self, below: Below | Mapping[str, Any]) -> None:
        super().__init__()
        self.below = from_fields(Below, "below", below) if isinstance(below, Mapping) else below
        if not isinstance(self.below, Below):
            raise ValueError(f"below is a Below or a mapping such as {{'measurements': 3}}; got {below!r}.")

    def start_afresh(self) -> None:
        super().start_afresh()
        self.in_a_row = 0
        self.value = math.nan  # the last measurement that was used
        self.seen = -1  # its step
        self.waiting: Sequence[Sequence[Any]] = []  # from a checkpoint, not used yet
        self._source: Any = None

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        monitor, refusals = self.below.monitor, []
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if callable(getattr(callback, "measurements", None)):
                try:
                    callback.measurements(monitor)
                except KeyError as error:
                    refusals.append(f"{type(callback).__name__} does not ({error.args[0] if error.args else monitor})")
                    continue
                self._source = callback
                return
        reason = "; ".join(refusals) or f"no callback of {len(callbacks)} measures anything"
        raise MisconfigurationException(
            f"{owner}(below=...) needs measurements of {monitor!r}, which no callback of the Trainer offers: {reason}. "
            "Add GradientNoiseMonitor(), which measures 'gradient_noise/ratio', or name another monitor."
        )

    def _news(self) -> list[tuple[int, float]]:
        values = {step: value for step, value in self.waiting if step > self.seen}
        measured: Sequence[tuple[int, float]] = self._source.measurements(self.below.monitor) if self._source else []
        for step, value in reversed(measured):
            if step <= self.seen:
                break
            values[step] = value
        return sorted(values.items())

    def look(self, trainer: Trainer) -> None:
        if self.due < math.inf:
            return
        for step, value in self._news():
            if step >= trainer.global_step:  # a callback later in the list may not have it yet
                break
            self.seen, self.value = step, value
            is_below = trainer.strategy.reduce_boolean_decision(value < self.below.threshold, all=False)
            self.in_a_row = self.in_a_row + 1 if is_below else 0
            if self.in_a_row >= self.below.measurements:
                self.due = trainer.global_step
                break

    def why(self) -> str:
        below = self.below
        return f"{below.monitor} {self.value:.6g} below {below.threshold:.6g}, {below.measurements} in a row"

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return super().state_dict(trainer) | {"waiting": self._news() if self.due == math.inf else []}
