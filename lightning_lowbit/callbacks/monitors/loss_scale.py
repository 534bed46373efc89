"""Watches the loss scale of fp16."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_lowbit._lightning import LightningModule, MisconfigurationException, Trainer, is_logging_step
from lightning_lowbit._torch import current_scale, growth_tracker
from lightning_lowbit.callbacks.monitors.base import Monitor, is_of_device
from lightning_lowbit.checks import integer
from lightning_lowbit.precision.grad_scalers import overflow
from lightning_lowbit.precision.loss_scaling import scaler_of
from lightning_lowbit.report.html import Section, Text
from lightning_lowbit.saved_state import NUMBER

# Counts in one float32 tensor, exact up to 2^24 steps. "falls" is 1 if there ever were too many.
_COUNTS = ("step", "scale", "skipped_steps", "overflows", "falls", "at_floor", "at_cap")
_LOGGED = ("scale", "growth_tracker", "overflows", "skipped_steps")

_ADVICE = {
    "falls": (
        "{falls} overflows came within {within} optimizer steps, where one now and then is usual; it is now {scale:g}. "
        "Look for what grows: a learning rate too high or a warm-up too short, data or activations with outliers. "
        "Clipping comes too late for that. Where the device has bf16, compute_dtype='bf16' needs no scale."
    ),
    "static": (
        "{falls} overflows came within {within} optimizer steps at {scale:g}, where it stays: lower it, or let it "
        "adapt, with a ConservativeGradScaler."
    ),
    "at_floor": (
        "it has been at its floor of {floor:g} for {within} optimizer steps: gradients leave the range of fp16 by "
        "themselves. The model needs the range of float32: train it with compute_dtype='bf16' or 'fp32'; or lower the "
        "floor."
    ),
    "at_cap": (
        "it has been at its cap of {cap:g} for {within} optimizer steps, and nothing overflows. If gradients are that "
        "small, raise the cap; if they are 0, look for what does not depend on the parameters."
    ),
}


class LossScaleMonitor(Monitor):
    """Logs the loss scale, and warns where it does not settle.

    It watches the ``GradScaler`` of a ``LowBitPrecision`` or of Lightning's ``MixedPrecision``. In each step that
    is logged: ``loss_scale/scale``; ``loss_scale/growth_tracker``, the steps without an overflow, below 0 while the
    scale cools down; ``loss_scale/overflows``, the steps with a gradient that was not finite since the last logged
    step; ``loss_scale/skipped_steps``, all of these since training began. It warns if overflows lower the scale
    ``falls`` times within ``within`` optimizer steps, or would at its floor, or if it stays at its floor or cap for
    ``within`` steps. Falls before the first step that is taken do not count.

    Args:
        falls: falls of the scale that are too many, at least 1; fewer are a ``ValueError``.
        within: window in optimizer steps, at least ``falls``; fewer are a ``ValueError``.

    Examples:
        >>> Trainer(plugins=[FP8Precision(compute_dtype="fp16")], callbacks=[LossScaleMonitor()])
    """

    saved: ClassVar[Any] = {"counts": dict.fromkeys(_COUNTS, NUMBER), "fell": [NUMBER], **Monitor.saved}

    def __init__(self, falls: int = 5, within: int = 100) -> None:
        self.falls = integer("falls", falls, 1, "how often the scale falls before a warning")
        self.within = integer("within", within, falls, "a number of optimizer steps, no fewer than falls")
        super().__init__()

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._counts = torch.zeros(len(_COUNTS))
        self._fell = torch.full((self.falls,), -math.inf)  # in which steps, the oldest first

    def _forget(self) -> None:
        super()._forget()
        # A step: the scale, the tracker, and whether it is skipped.
        self._under_way: tuple[Tensor, Tensor, Tensor | None] | None = None

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _scaler(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._is_idle:
            return
        scaler = _scaler(trainer)
        self._count(scaler)
        scale = current_scale(scaler)
        tracker = growth_tracker(scaler)
        if scale is not None and tracker is not None:
            self._under_way = scale.clone(), tracker.clone(), overflow(scaler, optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._under_way is None:  # no optimizer step
            return
        scaler = _scaler(trainer)
        self._count(scaler)
        if is_logging_step(trainer):
            self._keep_counts(trainer)
            values = dict(zip(_COUNTS, self._counts.unbind(), strict=True))
            tracker = growth_tracker(scaler)
            assert tracker is not None
            values["growth_tracker"] = tracker.float()
            self._log(pl_module, {f"loss_scale/{name}": values[name] for name in _LOGGED})
            self._counts = self._counts.clone()  # the logger may read the old tensor later
            self._counts[_COUNTS.index("overflows")] = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_idle:
            self._keep_counts(trainer)
        super().on_train_end(trainer, pl_module)

    @torch.no_grad()
    def _count(self, scaler: GradScaler) -> None:
        scale = current_scale(scaler)
        if self._under_way is None or scale is None:
            return
        (before, tracker, overflowed), self._under_way = self._under_way, None
        self._counts, self._fell = self._counts.to(scale.device), self._fell.to(scale.device)
        fell = scale < before
        if overflowed is None:  # torch's fused optimizers under Lightning's MixedPrecision: unscaled within their step
            grew = (tracker + 1 == scaler.get_growth_interval()) & ~fell  # or would, if it were not at its cap
            overflowed = (growth_tracker(scaler) != tracker + 1) & ~grew
        floor, cap = _bounds(scaler)
        step, _, skipped, overflows, falls, at_floor, at_cap = self._counts.unbind()
        # At its floor it cannot fall. Falls before the first taken step only correct the initial scale.
        stopped = (fell & (step > skipped)) | (overflowed & (scale <= floor))
        self._fell = torch.where(stopped, torch.cat([self._fell[1:], step[None] + 1]), self._fell)
        falls = falls.maximum(self._fell[-1] - self._fell[0] < self.within)
        at_floor = torch.where(scale <= floor, at_floor + 1, 0)
        at_cap = torch.where(scale >= cap, at_cap + 1, 0)
        counts = (step + 1, scale, skipped + overflowed, overflows + overflowed, falls, at_floor, at_cap)
        self._counts = torch.stack(counts)

    def _keep_counts(self, trainer: Trainer) -> None:
        self._keep(trainer.global_step, {"counts": self._counts}, *_bounds(_scaler(trainer)))

    def _judge(self, step: int, columns: Mapping[str, Any], floor: float, cap: float) -> None:
        counts = dict(zip(_COUNTS, columns["counts"], strict=True))
        is_moving = floor < cap
        facts = {"falls": self.falls, "within": self.within, "scale": counts["scale"], "floor": floor, "cap": cap}
        for kind, holds in (
            ("falls", is_moving and counts["falls"] > 0),
            ("static", not is_moving and counts["falls"] > 0),
            ("at_floor", is_moving and counts["at_floor"] >= self.within),
            ("at_cap", is_moving and counts["at_cap"] >= self.within),
        ):
            if holds:
                self._alerts.note("Loss scale", kind, 1.0, _ADVICE[kind].format(**facts))

    def _numbers(self) -> dict[str, Any]:
        return {"counts": dict(zip(_COUNTS, self._counts.tolist(), strict=True)), "fell": self._fell.tolist()}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._counts = torch.tensor([state["counts"][name] for name in _COUNTS])
        fell = [*[-math.inf] * self.falls, *state["fell"]]
        self._fell = torch.tensor(fell[-self.falls :])

    def report_sections(self, trainer: Trainer) -> list[Section]:
        self._read()
        try:
            counts = dict(zip(_COUNTS, self._counts.tolist(), strict=True))
        except RuntimeError as error:
            if not is_of_device(error):
                raise
            return [Section("Loss scale", [Text("Lost in an error of the device.")])]
        if not counts["step"]:
            return [Section("Loss scale", [Text("No optimizer step was taken.")])]
        text = f"{counts['skipped_steps']:.0f} of {counts['step']:.0f} optimizer steps were skipped, since a gradient "
        text += f"was not finite. The loss scale ended at {counts['scale']:g}."
        return [Section("Loss scale", [Text(text)])]


def _scaler(trainer: Trainer) -> GradScaler:
    if (scaler := scaler_of(plugin := trainer.precision_plugin)) is None:
        raise MisconfigurationException(
            f"LossScaleMonitor needs a scale, and {type(plugin).__name__} with precision {plugin.precision!r} has "
            "none: train with compute_dtype='fp16' (or precision='16-mixed'), or leave out the callback."
        )
    return scaler


def _bounds(scaler: GradScaler) -> tuple[float, float]:
    """Returns floor and cap; for torch's scaler, which has none, 1 and infinity."""
    return getattr(scaler, "floor", 1.0), getattr(scaler, "cap", math.inf)
