"""Changing the precision in mid-training, at once or progressively.

    sudden      from a step on all layers are in another phase
    gradual     and each operand that has a cast is x + λ (q(x) - x), where λ goes from 0 to 1 within some steps

A gradual switch softens the shock of coarse operands, for instance where pretrained or 16-bit weights become ternary:
"Fine-tuning LLMs to 1.58bit" (huggingface.co/blog/1_58_llm_extreme_quantization) does so; arXiv 2502.11895 finds that
it makes the loss jump less, and that longer training makes up for the jump, too.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_lowbit.callbacks.switch import Plateau, Switch
from lightning_lowbit.nn.casts import PHASES
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.quant.cast import choose, is_number

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
    """Puts all layers into a phase from a step on, at once or progressively.

    The switch happens before the first micro-batch of that optimizer step. Of several switches, the last one that is
    due holds, and of several at one step the last in the list.

    With ``over`` or ``steps`` it is gradual: the layers are in the phase from its beginning on, but as good as in high
    precision, since λ starts at 0 (see :meth:`LowBitPrecision.set_blend`); i optimizer steps later it is what the
    schedule says of i / length, and all the way from the end on. A sudden switch sets λ to 1.

    Phase and λ live in the precision plugin and are part of its checkpoint. This callback's own state is what it saw of
    a plateau. A run that resumes in the middle of a switch goes on with it.

    Args:
        to: ``"qaf"``, ``"hp-forward"``, ``"bf16"`` or ``"fqt"``; see :meth:`LinearCasts.phase`.
        at: when, as a fraction of all optimizer steps, in [0, 1].
        step: when, as a number of optimizer steps; instead of ``at``.
        plateau: when, as a :class:`Plateau` of a metric or its fields (``monitor``, ``patience``, ``min_delta``,
            ``mode``): at the first optimizer step after ``patience`` validations in a row without an improvement. Once;
            instead of ``at`` and ``step``.
        over: how long a gradual switch takes, as a fraction of all optimizer steps, in (0, 1).
        steps: how long a gradual switch takes, as a number of optimizer steps, at least 1; instead of ``over``.
        schedule: of λ: ``"linear"``, ``"cosine"``, ``"sigmoid"`` or ``"delayed"``, which is linear after half of the
            time.

    Raises:
        ValueError: no such phase or schedule; not exactly one of ``at``, ``step`` and ``plateau``; both of ``over`` and
            ``steps``; an argument out of range, or one that would have no effect.
        MisconfigurationException: when training starts: the Trainer has no plugin of lightning_lowbit, a fraction is
            asked for of a run whose number of steps is not known, or a plateau of one without validation; or after a
            validation: the metric is not there.

    Example:
        A tenth of the run in high precision, then a tenth that leads to ternary weights:

        >>> Trainer(
        ...     plugins=[TernaryPrecision()],
        ...     callbacks=[PrecisionSwitch("bf16", step=0), PrecisionSwitch("fqt", at=0.1, over=0.1)],
        ... )

        In YAML, a new start in high precision where validation gets no further::

            callbacks:
              - class_path: lightning_lowbit.PrecisionSwitch
                init_args: {to: fqt, plateau: {monitor: val_loss, patience: 3}, over: 0.1, schedule: cosine}
    """

    changes = "precision"

    def __init__(
        self,
        to: str,
        *,
        at: float | None = None,
        step: int | None = None,
        plateau: Plateau | Mapping[str, Any] | None = None,
        over: float | None = None,
        steps: int | None = None,
        schedule: str = "linear",
    ) -> None:
        self.to = choose("phase", to, PHASES)
        super().__init__(at, step, plateau)
        self.over, self.steps, self.schedule = over, steps, choose("schedule", schedule, SCHEDULES)
        self._length = 0  # in steps
        if over is not None and steps is not None:
            raise ValueError(
                f"Give over (a fraction of all steps) or steps (a number), not both; got {over=}, {steps=}."
            )
        if over is not None and (not is_number(over) or not 0 < over < 1):
            raise ValueError(f"over is a fraction of all optimizer steps, between 0 and 1; got {over!r}.")
        if over is not None and (at or 0) + over >= 1:
            raise ValueError(
                "The switch would not be over before the run is, which would end half quantised: at + over is less "
                f"than 1; got {at=}, {over=}."
            )
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ValueError(f"steps is a number of optimizer steps, 1 or more; got {steps!r}.")
        if not self.is_gradual and schedule != "linear":
            raise ValueError(f"A sudden switch has no schedule: give over or steps as well; got {schedule=}.")
        if self.is_gradual and to == "bf16":
            raise ValueError(
                "In the phase 'bf16' there is nothing to quantise progressively: leave out over and steps."
            )

    @property
    def is_gradual(self) -> bool:
        """Whether λ rises step by step."""
        return self.over is not None or self.steps is not None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resolves the fractions."""
        if not isinstance(trainer.precision_plugin, LowBitPrecision):
            raise MisconfigurationException(
                f"{type(self).__name__} switches the phase of a LowBitPrecision plugin, but the Trainer has "
                f"{type(trainer.precision_plugin).__name__}. Use e.g. Trainer(plugins=[FP4Precision()])."
            )
        super().on_train_start(trainer, pl_module)
        if self.is_gradual:
            self._length = max(1, self._in_steps("over", "steps", trainer, pl_module))
        alike = [switch for switch in self._rivals(trainer) if switch.to == self.to]
        early = all(trainer.global_step < switch._resolve(trainer, pl_module) for switch in alike)
        if trainer.precision_plugin.phase == self.to != "fqt" and early and self.plateau is None:
            rank_zero_warn(
                f"The run is in phase {self.to!r} already, as its checkpoint was, though {type(self).__name__} is due "
                f"at step {self._due}; it stays so. PrecisionSwitch('fqt', step={trainer.global_step}) goes back."
            )
        due = any(switch._resolve(trainer, pl_module) <= trainer.global_step for switch in self._rivals(trainer))
        if trainer.precision_plugin.is_blending and not due and self is self._rivals(trainer)[0]:
            rank_zero_warn(
                f"The run is at λ = {float(trainer.precision_plugin.blend):.3g}, as its checkpoint was, in the middle "
                "of a gradual switch that none of its callbacks goes on with: λ stays so until one is due. Give the "
                "switch with which it was saved, or call plugin.set_blend(1.0)."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says so where a run ends in the middle."""
        plugin: Any = trainer.precision_plugin
        if plugin.is_blending and self is self._rivals(trainer)[0]:
            rank_zero_warn(
                f"Training ended at λ = {float(plugin.blend):.3g}: the model was not quantised all the way, and is not "
                "as it is evaluated and saved. Shorten the gradual switch, or train for longer."
            )

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the phase."""
        plugin: Any = trainer.precision_plugin
        if trainer.global_step < (end := self._due + self._length):
            rank_zero_info(f"Step {trainer.global_step}: progressive quantisation until step {end}.")
        if plugin.phase != self.to:
            rank_zero_info(f"Step {trainer.global_step}: precision phase {plugin.phase!r} -> {self.to!r}.")
            plugin.set_phase(self.to)
            for logger in trainer.loggers:
                logger.log_metrics({"phase": float(list(PHASES).index(self.to))}, step=trainer.global_step)

    def proceed(self, trainer: Trainer, pl_module: LightningModule, steps: int) -> bool:
        """Sets λ."""
        plugin: Any = trainer.precision_plugin
        progress = min(1.0, steps / self._length) if self._length else 1.0
        blend, was_blending = SCHEDULES[self.schedule](progress), plugin.is_blending
        plugin.set_blend(blend)
        is_end = progress == 1
        if (plugin.is_blending and trainer._logger_connector.should_update_logs) or (was_blending and is_end):
            # The end always: until the epoch is over, Lightning writes the last value again each time. A tensor on the
            # host: a float would be copied to the device, which waits for it.
            pl_module.log("blend", torch.tensor(blend), batch_size=1)
        return is_end


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
