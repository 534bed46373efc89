"""Changes the precision during training, at once or gradually, of all layers or of some.

phase            all layers are in it from a step on
phase, gradual   operands with a cast are x + λ (q(x) - x), where λ rises from 0 to 1 over some steps
mapping          some layers have other casts from a step on; the phase still applies to them
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from lightning_lowbit._lightning import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    forget_logged,
    is_logging_step,
    logger_step,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_lowbit.callbacks.learning_rates import LowerRates
from lightning_lowbit.callbacks.switches.base import Switch
from lightning_lowbit.callbacks.switches.metric_triggers import Below, Plateau
from lightning_lowbit.callbacks.switches.step_triggers import steps_of
from lightning_lowbit.checks import choose, integer, number
from lightning_lowbit.nn.casts.linear_casts import PHASES
from lightning_lowbit.nn.conversion.convert import CastsLike
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.changed_casts import named_casts
from lightning_lowbit.report.html import Section, Table

# λ as a function of the progress u of a switch, in [0, 1]. Each rises from exactly 0 to exactly 1.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda u: u,
    "cosine": lambda u: (1 - math.cos(math.pi * u)) / 2,
    # The logistic curve of 10 (u - 1/2), stretched to meet 0 and 1. Its slope halfway is 2.5 times that of "linear".
    "sigmoid": lambda u: (1 + math.tanh(5 * (u - 0.5)) / math.tanh(2.5)) / 2,
    "delayed": lambda u: max(0.0, 2 * u - 1),
}


class PrecisionSwitch(Switch):
    """Puts all layers into a phase from a step on, at once or gradually, or gives some layers other casts.

    See ``docs/guides/switches.md`` for triggers, gradual switches, switches of some layers, and resuming.

    Args:
        to: ``"qaf"``, ``"hp-forward"``, ``"bf16"`` or ``"fqt"``, see ``LinearCasts.phase``; or a mapping from name
            patterns of layers to one of these, a preset's name, or casts.
        at: when, as a fraction of all optimizer steps, in [0, 1]. Give one of ``at`` to ``below``.
        step: when, as a number of optimizer steps.
        tokens: when, as a number of tokens trained on, over all data-parallel ranks.
        count: returns the tokens of a batch as an int; None counts the elements of ``batch["input_ids"]``, or of a
            batch that is an integer tensor.
        plateau: when, as a :class:`Plateau` of a validation metric, or its fields.
        below: when, as a :class:`Below` of a measured metric, or its fields.
        over: length of a gradual switch, as a fraction of all optimizer steps, in (0, 1).
        steps: length of a gradual switch in optimizer steps, at least 1; instead of ``over``.
        schedule: of λ: ``"linear"``, ``"cosine"``, ``"sigmoid"`` or ``"delayed"`` (0 for the first half, then linear).
        rewarm: optimizer steps, at least 1, of linear learning-rate warmup after the switch.
        moments: ``"keep"``, or ``"reset"`` to clear the states of all optimizers.

    Raises:
        ValueError: an argument is unknown, out of range, or would have no effect.
        MisconfigurationException: the run lacks something that the arguments need, such as the metric.

    Examples:
        >>> Trainer(plugins=[TernaryPrecision()], callbacks=[PrecisionSwitch("fqt", at=0.1, over=0.1)])
    """

    changes = "precision"
    saved: ClassVar[Any] = {"record?": {"step": int, "from": str, "to": str, "why": str}, "set?": int | None}

    def __init__(
        self,
        to: str | Mapping[str, CastsLike],
        *,
        at: float | None = None,
        step: int | None = None,
        tokens: int | None = None,
        count: Callable[[Any], int] | None = None,
        plateau: Plateau | Mapping[str, Any] | None = None,
        below: Below | Mapping[str, Any] | None = None,
        over: float | None = None,
        steps: int | None = None,
        schedule: str = "linear",
        rewarm: int | None = None,
        moments: str = "keep",
    ) -> None:
        self.to = dict(to) if isinstance(to, Mapping) else choose("phase", to, PHASES)
        if isinstance(self.to, dict):
            if not self.to:
                raise ValueError("to maps patterns of layers to casts, at least one; got {}.")
            for value in self.to.values():
                named_casts(value)  # raises if invalid
            self.changes, self.composes = "casts", True
        super().__init__(count, at=at, step=step, tokens=tokens, plateau=plateau, below=below)
        self.over, self.steps, self.schedule = over, steps, choose("schedule", schedule, SCHEDULES)
        self.rewarm, self.moments = rewarm, choose("moments", moments, ("keep", "reset"))
        self._length = 0  # optimizer steps
        self._record: dict[str, Any] | None = None  # the change that it made in this run, for reports
        self._set: int | None = None  # when it set the phase; None if another switch did since
        self._rates = LowerRates()
        number("over", over, "a fraction of all optimizer steps", above=0, below=1, or_none=True)
        integer("steps", steps, 1, "a number of optimizer steps", or_none=True)
        integer("rewarm", rewarm, 1, "a number of optimizer steps", or_none=True)
        if over is not None and steps is not None:
            raise ValueError(f"Give over (a fraction) or steps (a number), not both; got {over=}, {steps=}.")
        if over is not None and (self.at or 0) + over >= 1:
            ends = "The switch would not be over before the run is, which would end half quantized"
            raise ValueError(f"{ends}: at + over is less than 1; got at={self.at}, {over=}.")
        if not self.is_gradual and self.schedule != "linear":
            raise ValueError(f"A sudden switch has no schedule: give over or steps; got schedule={self.schedule!r}.")
        if self.is_gradual and self.to == "bf16":
            raise ValueError("The phase 'bf16' quantizes nothing, so not progressively: leave out over and steps.")
        if self.is_gradual and self.composes:
            raise ValueError("λ is for all layers, and a mapping for some: leave out over and steps, or give a phase.")

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._record = self._set = None

    @property
    def is_gradual(self) -> bool:
        return self.over is not None or self.steps is not None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plugin, name = self._needs_plugin(trainer), type(self).__name__
        if self.rewarm is not None or self.moments != "keep":
            self._refuse_deepspeed(trainer, "leave out rewarm and moments")
        super().on_train_start(trainer, pl_module)
        if self.over is not None:
            self._length = max(1, steps_of("over", self.over, "steps", name, trainer, pl_module))
        else:
            self._length = self.steps or 0
        if isinstance(self.to, dict):
            try:
                plugin.resolve_casts(self.to)
            except ValueError as error:
                raise MisconfigurationException(f"{name}(to={self.to}) cannot be: {error}") from None
            self._done = self._record is not None  # the checkpoint restored the casts
        else:
            self._warn_of_checkpoint(plugin, trainer, pl_module)

    def _warn_of_checkpoint(self, plugin: LowBitPrecision, trainer: Trainer, pl_module: LightningModule) -> None:
        due = [switch._resolve(trainer, pl_module) for switch in self._conflicting]
        alike = [step for switch, step in zip(self._conflicting, due, strict=True) if switch.to == self.to]
        if plugin.phase == self.to != "fqt" and trainer.global_step < min(alike) and self._trigger.is_known:
            rank_zero_warn(
                f"The run is in phase {self.to!r} already, as its checkpoint was, though {type(self).__name__} is due "
                f"at step {self._due}; it stays so. PrecisionSwitch('fqt', step={trainer.global_step}) goes back."
            )
        if plugin.is_blending and min(due) > trainer.global_step and self is self._conflicting[0]:
            rank_zero_warn(
                f"The run is at λ = {float(plugin.blend):.3g}, as its checkpoint was, in the middle of a gradual "
                "switch that none of its callbacks continues: λ stays so until one is due. Give the switch with which "
                "it was saved, or call plugin.set_blend(1.0)."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        is_taken = logger_step(trainer) % _every(trainer) == 0  # by the logger, of the step before
        is_first = self._looked != trainer.global_step and not self.composes and self is self._conflicting[0]
        if is_taken and is_first:
            forget_logged(trainer, ["blend"], "on_train_batch_start")
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._record is not None and self.rewarm is not None:
            steps = trainer.global_step - self._record["step"] + 1
            self._rates.by(min(1.0, steps / self.rewarm), trainer.optimizers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._rates.release()
        plugin: Any = trainer.precision_plugin
        if plugin.is_blending and not self.composes and self is self._conflicting[0]:
            rank_zero_warn(
                f"Training ended at λ = {float(plugin.blend):.3g}: the model was not quantized all the way, and is not "
                "as it is evaluated and saved. Shorten the gradual switch, or train for longer."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._rates.release()

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plugin: Any = trainer.precision_plugin
        if isinstance(self.to, dict):
            casts = {pattern: dict.fromkeys(map(str, plugin.casts_of(pattern).values())) for pattern in self.to}
            before = _described({pattern: " / ".join(texts) for pattern, texts in casts.items()})
            to = _described(self.to)
            rank_zero_info(f"Step {trainer.global_step}: casts of {before} -> {to}.")
            plugin.set_casts(self.to)
        else:
            before, to = plugin.phase, self.to
            if self._set is None or self._set < self._due:  # otherwise the checkpoint restored the phase
                self._set_phase(trainer, plugin, self.to)
        if self._record is not None:  # the run was resumed or continues
            return
        self._record = {"step": trainer.global_step, "from": before, "to": to, "why": self._trigger.why()}
        for optimizer in trainer.optimizers if self.moments == "reset" else ():
            # Clears the state instead of replacing it: wrappers may refer to it.
            getattr(optimizer, "reset_moments", optimizer.state.clear)()

    def _set_phase(self, trainer: Trainer, plugin: Any, phase: str) -> None:
        if trainer.global_step < (end := self._due + self._length):
            rank_zero_info(f"Step {trainer.global_step}: progressive quantization until step {end}.")
        if plugin.phase != phase:
            rank_zero_info(f"Step {trainer.global_step}: precision phase {plugin.phase!r} -> {phase!r}.")
            for logger in trainer.loggers:
                logger.log_metrics({"phase": float(list(PHASES).index(phase))}, step=logger_step(trainer))
        plugin.set_phase(phase)  # also if unchanged: this ends temporary phases
        for switch in self._conflicting:
            switch._set = trainer.global_step if switch.state_key == self.state_key else None

    def proceed(self, trainer: Trainer, pl_module: LightningModule, steps: int) -> bool:
        if self.composes:
            return True
        plugin: Any = trainer.precision_plugin
        progress = min(1.0, steps / self._length) if self._length else 1.0
        blend, was_blending = SCHEDULES[self.schedule](progress), plugin.is_blending
        plugin.set_blend(blend)
        is_end = progress == 1
        if (plugin.is_blending and is_logging_step(trainer)) or (is_end and (was_blending or self._is_untold(trainer))):
            # The end is always logged: Lightning repeats it until the logger takes it. A CPU tensor: a float would be
            # copied to the device, which is synchronous.
            pl_module.log("blend", torch.tensor(blend), batch_size=1)
        return is_end

    def _is_untold(self, trainer: Trainer) -> bool:
        """Returns whether the logger has taken no step since the end of a gradual switch, before a resume."""
        end, every, now = self._due + self._length, _every(trainer), logger_step(trainer)
        return self._length > 0 and now // every == (now - trainer.global_step + end) // every

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        state = super()._state(trainer)
        return state if self._record is None else state | {"record": dict(self._record), "set": self._set}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._record, self._set = state.get("record"), state.get("set")

    def _records(self, trainer: Trainer) -> list[dict[str, Any]]:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        switches = [switch for switch in callbacks if isinstance(switch, PrecisionSwitch)]
        if switches[0] is not self:
            return []
        records = {switch.state_key: switch._record for switch in switches}  # equal switches count once
        return sorted((dict(record) for record in records.values() if record), key=lambda record: record["step"])

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        records = self._records(trainer)
        return {"precision_switches": records} if records else {}

    def report_sections(self, trainer: Trainer) -> list[Section]:
        header = ["step", "from", "to", "why"]
        rows = [[record[name] for name in header] for record in self._records(trainer)]
        return [Section("Precision", [Table(header, rows)])] if rows else []


def _every(trainer: Trainer) -> int:
    return trainer.log_every_n_steps or 1  # type: ignore[attr-defined]


def _described(casts: Mapping[str, object]) -> str:
    return ", ".join(f"{pattern}: {text}" for pattern, text in casts.items())


class QAFSwitch(PrecisionSwitch):
    """Quantization-aware finetuning: from a step on, only the forward pass is quantized.

    The backward pass computes in high precision (FP4 All the Way, arXiv 2505.19115, section 4).

    Args:
        at: when, as a fraction of all optimizer steps. Give one of ``at`` to ``below``.
        step: when, as a number of optimizer steps.
        tokens: when, as a number of tokens.
        count: returns the tokens of a batch.
        plateau: when, as a plateau of a validation metric.
        below: when, as a threshold of a measured metric; ``below={}`` is the paper's.
        rewarm: optimizer steps of learning-rate warmup.
        moments: ``"keep"`` or ``"reset"``.

    Examples:
        >>> Trainer(plugins=[FP4Precision("nvfp4")], callbacks=[QAFSwitch(at=0.9)])
    """

    def __init__(
        self,
        *,
        at: float | None = None,
        step: int | None = None,
        tokens: int | None = None,
        count: Callable[[Any], int] | None = None,
        plateau: Plateau | Mapping[str, Any] | None = None,
        below: Below | Mapping[str, Any] | None = None,
        rewarm: int | None = None,
        moments: str = "keep",
    ) -> None:
        when: dict[str, Any] = {"at": at, "step": step, "tokens": tokens, "plateau": plateau, "below": below}
        super().__init__("qaf", count=count, rewarm=rewarm, moments=moments, **when)
