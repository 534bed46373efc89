"""Changing the precision in mid-training, at once or progressively, of all layers or of some.

    to a phase      from a step on all layers are in it
      gradually     and each operand that has a cast is x + λ (q(x) - x), where λ goes from 0 to 1 within some steps
    to a mapping    from a step on some layers have other casts; the phase stays in force on top of them

A gradual switch softens the shock of coarse operands, for instance where pretrained or 16-bit weights become ternary:
"Fine-tuning LLMs to 1.58bit" (huggingface.co/blog/1_58_llm_extreme_quantization) does so; arXiv 2502.11895 finds that
it makes the loss jump less, and that longer training makes up for the jump, too.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_lowbit._lightning import (
    DeepSpeedStrategy,
    LightningModule,
    MisconfigurationException,
    Trainer,
    is_logging_step,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_lowbit.callbacks.learning_rates import Rewarm
from lightning_lowbit.callbacks.switches.base import Switch
from lightning_lowbit.callbacks.switches.metric_triggers import Below, Plateau
from lightning_lowbit.callbacks.switches.step_triggers import steps_of
from lightning_lowbit.nn.casts import PHASES
from lightning_lowbit.nn.conversion.convert import CastsLike
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.converted_model import named_casts
from lightning_lowbit.quant.cast import choose, is_number
from lightning_lowbit.report.html import Section, Table

# λ as a function of u in [0, 1], how much of the switch is over. Each rises from exactly 0 to exactly 1.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda u: u,
    "cosine": lambda u: (1 - math.cos(math.pi * u)) / 2,
    # The logistic curve of 10 (u - 1/2), whose ends are 0.7 % off 0 and 1 and stretched to meet them. Half-way it is
    # 2.5 times as steep as "linear": a flatter one would hardly be another schedule, a steeper one nearly be sudden.
    "sigmoid": lambda u: (1 + math.tanh(5 * (u - 0.5)) / math.tanh(2.5)) / 2,
    "delayed": lambda u: max(0.0, 2 * u - 1),
}


class PrecisionSwitch(Switch):
    """Puts all layers into a phase from a step on, at once or progressively, or gives some layers other casts.

    The switch happens before the first micro-batch of that optimizer step. Of several switches to phases, the last one
    that is due holds, and of several at one step the last in the list.

    **Gradual.** With ``over`` or ``steps`` the layers are in the phase from its beginning on, but as good as in high
    precision, since λ starts at 0 (see :meth:`LowBitPrecision.set_blend`); i optimizer steps later it is what the
    schedule says of i / length, and all the way from the end on. A sudden switch sets λ to 1.

    **Some layers.** ``to={"lm_head": "bf16", "down_proj": "nvfp4-4over6"}`` gives the layers that a pattern matches
    other casts, see :meth:`LowBitPrecision.set_casts`; all others keep theirs, and a phase's name stands for what the
    plugin's constructor gave the layer, in this phase. Mappings and phases are no rivals, and compose: each mapping
    acts once, at its time, on what those before it have left; phases are on top, of the casts that layers have then.
    λ is left alone.

    Phase, casts and λ live in the precision plugin and are part of its checkpoint. This callback's own state is what it
    saw of its trigger, and whether it has acted. A run that resumes in the middle of a switch goes on with it, and does
    not set the phase again: somebody else, such as :class:`SpikeRollback`, may have changed it since.

    Args:
        to: ``"qaf"``, ``"hp-forward"``, ``"bf16"`` or ``"fqt"``, see :meth:`LinearCasts.phase`; or, by pattern of
            layers, one of these, a preset's name, or casts.
        at: when, as a fraction of all optimizer steps, in [0, 1].
        step: when, as a number of optimizer steps. Of ``at``, ``step``, ``tokens``, ``plateau`` and ``below`` one is
            given.
        tokens: when, as a number of tokens: before the first optimizer step that begins after so many were trained on,
            over all data-parallel ranks. They may get different numbers of them. Ranks add theirs up at some steps
            only, so that a step with more than twice the tokens of those before it may be noticed later.
        count: how many tokens a batch has, an int, for ``tokens``; None: the elements of ``batch["input_ids"]``, or of
            a batch that is a tensor of integers.
        plateau: when, as a :class:`Plateau` of a metric or its fields (``monitor``, ``patience``, ``min_delta``,
            ``mode``): at the first optimizer step after ``patience`` validations in a row without an improvement. Once.
        below: when, as a :class:`Below` or its fields (``monitor``, ``threshold``, ``measurements``): once a metric
            that a callback measures, such as ``GradientNoiseMonitor``, was below a threshold several times in a row.
        over: how long a gradual switch takes, as a fraction of all optimizer steps, in (0, 1).
        steps: how long a gradual switch takes, as a number of optimizer steps, at least 1; instead of ``over``.
        schedule: of λ: ``"linear"``, ``"cosine"``, ``"sigmoid"`` or ``"delayed"``, which is linear after half of the
            time.
        rewarm: optimizer steps, at least 1, over which the learning rate rises linearly to what the schedule says: the
            i-th step from the switch on has i / ``rewarm`` of it. Only optimizers see it: learning rates that are
            logged, by ``LearningRateMonitor``, say, are the schedule's. Those of several switches multiply. In manual
            optimization steps of all optimizers count, as they do in ``global_step``, and all those of a batch have the
            share of its first one. None: the learning rate goes on.
        moments: ``"keep"``, or ``"reset"``: the state of all optimizers starts anew. Of this package's optimizers only
            the moments do; statistics of the guards and master weights stay.

    Raises:
        ValueError: no such phase, preset or schedule; not exactly one of ``at``, ``step``, ``tokens``, ``plateau`` and
            ``below``; both of ``over`` and ``steps``; an argument out of range, or one that would have no effect.
        MisconfigurationException: when training starts: the Trainer has no plugin of lightning_lowbit, a pattern
            matches no converted layer, the backend refuses the casts, a fraction is asked for of a run whose number of
            steps is not known, a plateau of one without validation, or measurements that no callback makes; DeepSpeed
            with ``rewarm`` or ``moments``. Later: the metric is not there, or tokens cannot be counted.

    Example:
        A tenth of the run in high precision, then a tenth that leads to ternary weights:

        >>> Trainer(
        ...     plugins=[TernaryPrecision()],
        ...     callbacks=[PrecisionSwitch("bf16", step=0), PrecisionSwitch("fqt", at=0.1, over=0.1)],
        ... )

        In YAML, a new start in high precision where validation gets no further, and a last layer in high precision
        after 10⁹ tokens::

            callbacks:
              - class_path: lightning_lowbit.PrecisionSwitch
                init_args: {to: fqt, plateau: {monitor: val_loss, patience: 3}, over: 0.1, schedule: cosine}
              - class_path: lightning_lowbit.PrecisionSwitch
                init_args: {to: {lm_head: bf16}, tokens: 1000000000, rewarm: 100}
    """

    changes = "precision"

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
                named_casts(value)  # or else raises
            self.changes, self.composes = "casts", True
        super().__init__(count, at=at, step=step, tokens=tokens, plateau=plateau, below=below)
        self.over, self.steps, self.schedule = over, steps, choose("schedule", schedule, SCHEDULES)
        self.rewarm, self.moments = rewarm, choose("moments", moments, ("keep", "reset"))
        self._length = 0  # in steps
        self._record: dict[str, Any] | None = None  # what it did in this run, and when
        self._set: int | None = None  # the step at which it set the phase; None, too, if another switch did so later
        self._check_arguments()
        self._rates = Rewarm(rewarm or 1)

    def _check_arguments(self) -> None:
        over, steps = self.over, self.steps
        if over is not None and steps is not None:
            raise ValueError(
                f"Give over (a fraction of all steps) or steps (a number), not both; got {over=}, {steps=}."
            )
        if over is not None and (not is_number(over) or not 0 < over < 1):
            raise ValueError(f"over is a fraction of all optimizer steps, between 0 and 1; got {over!r}.")
        if over is not None and (self.at or 0) + over >= 1:
            raise ValueError(
                "The switch would not be over before the run is, which would end half quantized: at + over is less "
                f"than 1; got at={self.at}, {over=}."
            )
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ValueError(f"steps is a number of optimizer steps, 1 or more; got {steps!r}.")
        if not self.is_gradual and self.schedule != "linear":
            raise ValueError(
                f"A sudden switch has no schedule: give over or steps as well; got schedule={self.schedule!r}."
            )
        if self.is_gradual and self.to == "bf16":
            raise ValueError(
                "In the phase 'bf16' there is nothing to quantize progressively: leave out over and steps."
            )
        if self.is_gradual and self.composes:
            raise ValueError(
                "λ belongs to all layers, and a mapping is for some of them, which switch at once: leave out over and "
                "steps, or give a phase."
            )
        if self.rewarm is not None and (type(self.rewarm) is not int or self.rewarm < 1):
            raise ValueError(f"rewarm is a number of optimizer steps, 1 or more; got {self.rewarm!r}.")

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._record = self._set = None

    @property
    def is_gradual(self) -> bool:
        """Whether λ rises step by step."""
        return self.over is not None or self.steps is not None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resolves the fractions, and looks whether the run has what it takes."""
        plugin, name = trainer.precision_plugin, type(self).__name__
        if not isinstance(plugin, LowBitPrecision):
            raise MisconfigurationException(
                f"{name} switches the phase of a LowBitPrecision plugin, but the Trainer has {type(plugin).__name__}. "
                "Use e.g. Trainer(plugins=[FP4Precision()])."
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy) and (self.rewarm is not None or self.moments != "keep"):
            raise MisconfigurationException(
                f"{name} changes learning rates and states of optimizers, of which DeepSpeed keeps its own: leave out "
                "rewarm and moments, or use DDP, FSDPStrategy or ModelParallelStrategy."
            )
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
            self._done = self._record is not None  # the plugin has kept what came of it
        else:
            self._warn_of_checkpoint(plugin, trainer, pl_module)

    def _warn_of_checkpoint(self, plugin: LowBitPrecision, trainer: Trainer, pl_module: LightningModule) -> None:
        rivals = self._rivals(trainer)
        due = {id(switch): switch._resolve(trainer, pl_module) for switch in rivals}
        early = all(trainer.global_step < due[id(switch)] for switch in rivals if switch.to == self.to)
        if plugin.phase == self.to != "fqt" and early and self._trigger.is_known:
            rank_zero_warn(
                f"The run is in phase {self.to!r} already, as its checkpoint was, though {type(self).__name__} is due "
                f"at step {self._due}; it stays so. PrecisionSwitch('fqt', step={trainer.global_step}) goes back."
            )
        if plugin.is_blending and min(due.values()) > trainer.global_step and self is rivals[0]:
            rank_zero_warn(
                f"The run is at λ = {float(plugin.blend):.3g}, as its checkpoint was, in the middle of a gradual "
                "switch that none of its callbacks goes on with: λ stays so until one is due. Give the switch with "
                "which it was saved, or call plugin.set_blend(1.0)."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Acts when it is time, and warms up after that."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._record is not None:
            self._rates.follow(trainer.optimizers, trainer.global_step - self._record["step"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says so where a run ends in the middle."""
        self._rates.release()
        plugin: Any = trainer.precision_plugin
        if plugin.is_blending and not self.composes and self is self._rivals(trainer)[0]:
            rank_zero_warn(
                f"Training ended at λ = {float(plugin.blend):.3g}: the model was not quantized all the way, and is not "
                "as it is evaluated and saved. Shorten the gradual switch, or train for longer."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lets go of the optimizers, with their own learning rates, also if a step broke off."""
        self._rates.release()

    # --- what ---

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the phase, or casts; the first time in a run, the optimizers are told, too."""
        plugin: Any = trainer.precision_plugin
        if isinstance(self.to, dict):
            before = _described({pattern: _casts_of(plugin, pattern) for pattern in self.to})
            to = _described({pattern: str(value) for pattern, value in self.to.items()})
            rank_zero_info(f"Step {trainer.global_step}: casts of {before} -> {to}.")
            plugin.set_casts(self.to)
        else:
            before, to = plugin.phase, self.to
            if self._set is None or self._set < self._due:  # or else the plugin has kept what came of it
                self._set_phase(trainer, plugin, self.to)
        if self._record is not None:  # the run was resumed, or goes on
            return
        self._record = {"step": trainer.global_step, "from": before, "to": to, "why": self._trigger.why()}
        for optimizer in trainer.optimizers if self.moments == "reset" else ():
            # A state is emptied, and not replaced: others, such as a wrapper, may refer to it.
            getattr(optimizer, "reset_moments", optimizer.state.clear)()

    def _set_phase(self, trainer: Trainer, plugin: Any, phase: str) -> None:
        if trainer.global_step < (end := self._due + self._length):
            rank_zero_info(f"Step {trainer.global_step}: progressive quantization until step {end}.")
        if plugin.phase != phase:
            rank_zero_info(f"Step {trainer.global_step}: precision phase {plugin.phase!r} -> {phase!r}.")
            for logger in trainer.loggers:
                logger.log_metrics({"phase": float(list(PHASES).index(phase))}, step=trainer.global_step)
        plugin.set_phase(phase)  # also the one in force: a recovery in it ends here
        for switch in self._rivals(trainer):
            switch._set = trainer.global_step if switch.state_key == self.state_key else None

    def proceed(self, trainer: Trainer, pl_module: LightningModule, steps: int) -> bool:
        """Sets λ."""
        if self.composes:
            return True
        plugin: Any = trainer.precision_plugin
        progress = min(1.0, steps / self._length) if self._length else 1.0
        blend, was_blending = SCHEDULES[self.schedule](progress), plugin.is_blending
        plugin.set_blend(blend)
        is_end = progress == 1
        if (plugin.is_blending and is_logging_step(trainer)) or (was_blending and is_end):
            # The end always: until the epoch is over, Lightning writes the last value again each time. A tensor on the
            # host: a float would be copied to the device, which waits for it.
            pl_module.log("blend", torch.tensor(blend), batch_size=1)
        return is_end

    # --- what is left of it ---

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        return super()._state(trainer) | (
            {} if self._record is None else {"record": dict(self._record), "set": self._set}
        )

    def _load_state(self, state: dict[str, Any]) -> None:
        super()._load_state(state)
        self._record, self._set = state.get("record"), state.get("set")

    def _records(self, trainer: Trainer) -> list[dict[str, Any]]:
        """What all switches did, told by the first of them."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        switches = [switch for switch in callbacks if isinstance(switch, PrecisionSwitch)]
        if switches[0] is not self:
            return []
        records = {switch.state_key: switch._record for switch in switches}  # one that is there twice, once
        return sorted((dict(record) for record in records.values() if record), key=lambda record: record["step"])

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        """Of each switch that acted: at which step, from what, to what, and why."""
        records = self._records(trainer)
        return {"precision_switches": records} if records else {}

    def report_sections(self, trainer: Trainer) -> list[Section]:
        """The same as a table."""
        header = ["step", "from", "to", "why"]
        rows = [[record[name] for name in header] for record in self._records(trainer)]
        return [Section("Precision", [Table(header, rows)])] if rows else []


def _casts_of(plugin: LowBitPrecision, pattern: str) -> str:
    """The casts of the layers that a pattern matches, each once."""
    return " / ".join(dict.fromkeys(map(str, plugin.casts_of(pattern).values())))


def _described(casts: Mapping[str, str]) -> str:
    return ", ".join(f"{pattern}: {what}" for pattern, what in casts.items())


class QAFSwitch(PrecisionSwitch):
    """Quantization-aware finetuning: from a step on the forward pass stays quantized and the backward pass computes in
    high precision (FP4 All the Way, arXiv 2505.19115, section 4).

    Args:
        at: when, as a fraction of all optimizer steps.
        step: when, as a number of optimizer steps; instead of ``at``.
        tokens: when, as a number of tokens; this and all others are those of :class:`PrecisionSwitch`.
        count: how many tokens a batch has.
        plateau: when, as a plateau of a validation metric.
        below: when, as a threshold of a measured metric, such as that of the paper: ``below={}``.
        rewarm: optimizer steps over which the learning rate rises again.
        moments: ``"keep"`` or ``"reset"``.

    Example:
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
