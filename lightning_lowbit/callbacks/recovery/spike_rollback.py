"""Rolls weights back to before a spike of the training loss, while the data continue.

A new snapshot may already contain a bad update. Hence there are two: the last trusted one, and a candidate, which is
trusted once the losses of the ``good_for`` steps after it are good. Losses are judged one step late.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowbit._lightning import (
    LightningModule,
    MisconfigurationException,
    StochasticWeightAveraging,
    Trainer,
    is_logging_step,
    is_mid_step,
    is_validation_of_fit,
    rank_zero_warn,
)
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.learning_rates import GentleSteps
from lightning_lowbit.callbacks.recovery.snapshots import Snapshot, TrainingState, copies_of_weights
from lightning_lowbit.checks import choose, fraction, integer, positive, some
from lightning_lowbit.distributed import forget_gathered, local
from lightning_lowbit.metrics.spikes import SpikeDetector, Window, mean_limit
from lightning_lowbit.nn.casts.linear_casts import PHASES
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.loss_scaling import scaler_of
from lightning_lowbit.report.html import Section, Table, Text
from lightning_lowbit.saved_state import NUMBER, count

# A run has converged if its loss is below this share of the first losses.
_CONVERGED = 0.1


class StepLoss(NamedTuple):
    """The loss of the optimizer step after ``step`` steps, on its way to the host (``arrived``; None on the CPU).

    ``values`` is ``[2]``: the sum over micro-batches and ranks, and their number; float32, from a checkpoint float64.
    """

    step: int
    values: Tensor
    arrived: torch.Event | None = None

    def read(self) -> float | None:
        """Waits for the copy and returns the mean; None if no training step returned a loss."""
        if self.arrived is not None:
            self.arrived.synchronize()
        total, count = self.values.tolist()
        return total / count if count else None


class StepLosses:
    """Sums losses of micro-batches; ``pending`` holds the steps whose loss has not been read, in order."""

    def __init__(self) -> None:
        self.pending: deque[StepLoss] = deque()
        self._micro_batches: list[Tensor] = []

    def begin_step(self) -> None:
        self._micro_batches = []

    def add(self, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):  # otherwise training_step returned None
            self._micro_batches.append(local(loss).detach().float().reshape(()))

    def end_step(self, trainer: Trainer) -> None:
        # Lightning divides each loss by accumulate_grad_batches, but the last step of an epoch may have fewer
        # micro-batches. A rank without losses must still take part in the collective.
        none = torch.zeros((), device=trainer.strategy.root_device)
        total = sum(self._micro_batches, none) * trainer.accumulate_grad_batches
        values = torch.stack([total, none + len(self._micro_batches)])
        self._micro_batches = []
        values, arrived = trainer.strategy.reduce(values, reduce_op="sum"), None
        if values.device.type != "cpu":
            arrived = torch.Event(values.device)
            values = values.to("cpu", non_blocking=True)
            arrived.record()
        self.pending.append(StepLoss(trainer.global_step - 1, values, arrived))

    def read(self, leave: int = 0) -> Iterator[tuple[int, float]]:
        """Removes the oldest losses except the last few; yields (step, loss) of steps with a loss."""
        while len(self.pending) > leave:
            oldest = self.pending.popleft()
            if (loss := oldest.read()) is not None:
                yield oldest.step, loss

    def state(self) -> list[tuple[int, float | None]]:
        return [(loss.step, loss.read()) for loss in self.pending]

    def load(self, state: Iterable[tuple[int, float | None]]) -> None:
        values = [(step, [0.0, 0.0] if loss is None else [loss, 1.0]) for step, loss in state]
        self.pending = deque(
            StepLoss(step, torch.tensor(pair, dtype=torch.float64, device="cpu")) for step, pair in values
        )


class SpikeRollback(LowBitCallback):
    """Undoes the steps around a spike of the training loss, and skips their batches.

    A loss is a spike if it is not finite, or above ``mean + threshold · max(deviation, 0.01 · |mean|)`` of the last
    ``history`` good losses, and above the mean by 0.001 of the first ones. Then weights, buffers, their averages and
    other copies, optimizer states, loss scale and amaxes are restored from the last trusted snapshot; counters,
    schedules and data continue. A callback with a method ``on_rollback(trainer, pl_module)`` is told. See
    ``docs/guides/spikes.md``.

    **Memory**: two snapshots, each the size of this rank's parameters, buffers, their copies and optimizer state.

    Args:
        threshold: standard deviations above the mean, above 0.
        history: number of good losses for mean and deviation, at least 2.
        warmup_steps: good losses before a finite one can be a spike, at least 2.
        every_n_steps: optimizer steps between snapshots, at least 1.
        good_for: good steps until a snapshot is trusted, fewer than ``every_n_steps``.
        device: where snapshots are kept: ``"same"`` (as the original) or ``"cpu"``.
        recovery_steps: optimizer steps with ``lr_factor`` and ``phase`` after a rollback, at least 1.
        lr_factor: factor of learning rates in these steps, in (0, 1].
        phase: precision phase in these steps, such as ``"bf16"``; None for no change.
        max_rollbacks: most rollbacks within ``within`` steps, and to the same snapshot, at least 1. A spike after them
            below a tenth of the first losses counts as a good loss.
        within: a number of optimizer steps, at least 1.

    Raises:
        ValueError: an argument is out of range.
        MisconfigurationException: manual optimization, DeepSpeed, ``StochasticWeightAveraging``, or ``phase`` without a
            :class:`LowBitPrecision`.
        RuntimeError: ``max_rollbacks`` is exceeded (weights are restored before), or a checkpoint was saved after a
            spike.

    Examples:
        >>> Trainer(plugins=[FP4Precision()], callbacks=[SpikeRollback(phase="bf16", lr_factor=0.5)])
    """

    saved: ClassVar[Any] = {
        "good": [NUMBER],
        "seen": count,
        "start?": NUMBER,
        "pending": [(int, NUMBER | None)],
        "rollbacks": [dict.fromkeys(("step", "spike", "loss", "mean", "to"), NUMBER)],
        **GentleSteps.saved,
    }

    def __init__(
        self,
        threshold: float = 6.0,
        history: int = 100,
        warmup_steps: int = 100,
        *,
        every_n_steps: int = 100,
        good_for: int = 20,
        device: str = "same",
        recovery_steps: int = 100,
        lr_factor: float = 1.0,
        phase: str | None = None,
        max_rollbacks: int = 3,
        within: int = 1000,
    ) -> None:
        self.threshold = positive("threshold", threshold, "a number of standard deviations")
        self.history = integer("history", history, 2)
        self.warmup_steps = integer("warmup_steps", warmup_steps, 2)
        self.every_n_steps = integer("every_n_steps", every_n_steps, 1)
        self.good_for = integer("good_for", good_for, 0)
        if good_for >= every_n_steps:
            rule = "A snapshot proves good before the next one is taken: good_for is less than every_n_steps"
            raise ValueError(f"{rule}; got {good_for=}, {every_n_steps=}.")
        self.device = choose("device of snapshots", device, ("same", "cpu"))
        self.recovery_steps = integer("recovery_steps", recovery_steps, 1)
        self.lr_factor = fraction("lr_factor", lr_factor, "what remains of learning rates")
        self.phase = None if phase is None else choose("phase", phase, PHASES)
        self.max_rollbacks = integer("max_rollbacks", max_rollbacks, 1)
        self.within = integer("within", within, 1)
        self._parameters: list[Tensor] = []
        self._begins_step = True
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._good = Window(self.history, mean_limit(self.threshold))
        self._detector = SpikeDetector(self._good, self.warmup_steps)
        self._losses = StepLosses()
        self._gentle = GentleSteps(type(self).__name__, self.lr_factor, self.phase)
        self._rollbacks: list[dict[str, float]] = []
        self._trusted, self._candidate = Snapshot(self.device), Snapshot(self.device)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collects the parameters now: after the sanity check, FSDP may not have resharded them."""
        self._needs_automatic_optimization(pl_module)
        self._refuse_deepspeed(trainer)
        if self.phase is not None:
            self._needs_plugin(trainer)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
            raise MisconfigurationException(
                "SpikeRollback cannot take undone weights out of StochasticWeightAveraging, which averages once in an "
                "epoch, and sets weights itself in its last one. Use WeightAveraging or EMAWeightAveraging, or leave "
                "out one of the two."
            )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        optimized = [parameter for group in groups for parameter in group["params"]]
        self._parameters = list(dict.fromkeys([*optimized, *pl_module.parameters()]))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trusted.step = self._candidate.step = None
        self._begins_step = True
        self._losses.begin_step()
        self._gentle.resume(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not self._begins_step:
            return
        if self._trusted.step is None:  # not in on_train_start, where callbacks after this one may set weights
            self._trusted.take(trainer.global_step, self._state_of(trainer))
        self._judge(trainer, leave=1)
        self._begins_step, step = False, trainer.global_step
        if self._gentle.until is not None and step >= self._gentle.until:
            self._gentle.end()
        if step % self.every_n_steps == 0 and step > (self._trusted.step or 0):
            self._candidate.take(step, self._state_of(trainer))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Adds parameters that have joined since, before their first update."""
        before = set(self._parameters)
        if newcomers := [p for group in optimizer.param_groups for p in group["params"] if p not in before]:
            self._parameters += newcomers
            for snapshot in (self._trusted, self._candidate):
                snapshot.add(self._state_of(trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self._losses.add(outputs)
        if is_mid_step(trainer):
            return
        self._begins_step = True
        self._losses.end_step(trainer)
        if is_logging_step(trainer):
            numbers: dict[str, float] = {"rollbacks": len(self._rollbacks)}
            if (limit := self._detector.limit) < math.inf:
                numbers |= {"mean": fmean(self._good.values), "limit": limit}
            metrics = {f"spike_rollback/{name}": torch.tensor(float(value)) for name, value in numbers.items()}
            pl_module.log_dict(metrics, batch_size=1)  # CPU tensors: a float would be copied to the device

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judges before a validation, unless gradients are being accumulated: they belong to the current weights."""
        if is_validation_of_fit(trainer) and self._begins_step:
            self._judge(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._judge(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._judge(trainer)
        self._gentle.suspend()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._gentle.suspend()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._parameters, self._trusted, self._candidate = [], Snapshot(self.device), Snapshot(self.device)

    def _judge(self, trainer: Trainer, leave: int = 0) -> None:
        for step, loss in self._losses.read(leave):
            if self._detector.judge(loss) and not self._is_tolerated(trainer.global_step, loss):
                self._losses.pending.clear()
                self._roll_back(trainer, step, loss)
                return
            if self._candidate.step is not None and step >= self._candidate.step + self.good_for - 1:
                self._trusted, self._candidate = self._candidate, self._trusted
                self._candidate.step = None

    def _recent(self, step: int) -> list[dict[str, float]]:
        """Returns the rollbacks that ``max_rollbacks`` limits, when the next one is due after ``step`` steps."""
        return [r for r in self._rollbacks if r["step"] > step - self.within or r["to"] == self._trusted.step]

    def _is_tolerated(self, step: int, loss: float) -> bool:
        """Tells whether a spike counts as a good loss, and learns it: it would end a run that has converged.

        Its loss is far below the first losses, and so is the spike.
        """
        if len(self._recent(step)) < self.max_rollbacks or not abs(loss) < _CONVERGED * self._good.start:
            return False
        self._good.add(loss)
        return True

    def _roll_back(self, trainer: Trainer, spike: int, loss: float) -> None:
        step, to, good = trainer.global_step, self._trusted.step, self._good.values
        assert to is not None
        mean = fmean(good) if good else math.nan
        message = f"The loss of step {spike} is {loss:.4g}, and {mean:.4g} in the mean of {len(good)} before it"
        if spike < to:
            raise RuntimeError(
                f"{message}; the checkpoint of this run was saved after it, at step {to}: resume from an earlier one."
            )
        missing = self._trusted.put_back(self._state_of(trainer))
        if trainer.model is not None:
            forget_gathered(trainer.model)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if callable(hook := getattr(callback, "on_rollback", None)):
                hook(trainer, trainer.lightning_module)
        self._candidate.step = None
        if len(since := self._recent(step)) >= self.max_rollbacks:
            raise RuntimeError(
                f"{message}. SpikeRollback has gone back {len(since)} times since step {since[0]['step']} "
                f"(max_rollbacks={self.max_rollbacks}): it is no batch that is to blame. The weights are those of step "
                f"{to}. Lower the learning rate, raise the precision, or look at the data from step {spike} on."
            )
        self._rollbacks.append({"step": step, "spike": spike, "loss": loss, "mean": mean, "to": to})
        self._gentle.begin(trainer, step + self.recovery_steps)
        warning = (
            f"SpikeRollback: {message}. Step {step} continues with the weights of step {to}; the batches in between "
            "are left out."
        )
        if missing:
            warning += (
                f" Not restored: {some(missing)}, which step {to} did not have so. Where it is an average of weights, "
                "it holds undone ones: create it before training starts."
            )
        rank_zero_warn(warning)

    def _state_of(self, trainer: Trainer) -> TrainingState:
        plugin = trainer.precision_plugin
        histories = plugin.histories if isinstance(plugin, LowBitPrecision) else None
        # The plugin's counters and phase are not restored.
        others = [other for other in (scaler_of(plugin), histories) if other is not None]
        buffers = {f"buffer {name}": [buffer] for name, buffer in trainer.lightning_module.named_buffers()}
        return TrainingState(self._parameters, trainer.optimizers, others, buffers | copies_of_weights(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Returns statistics, rollbacks and gentle steps, without snapshots; waits for pending losses."""
        return {
            "good": list(self._good.values),
            "seen": self._good.count,
            "start": self._good.start,
            "pending": self._losses.state(),
            "rollbacks": [dict(rollback) for rollback in self._rollbacks],
            **self._gentle.state(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._good.load(state["good"], state["seen"], state.get("start"))  # older checkpoints have no start
        self._losses.load(state["pending"])
        self._rollbacks = [dict(rollback) for rollback in state["rollbacks"]]
        self._gentle.load(state)

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        return {"rollbacks": [dict(rollback) for rollback in self._rollbacks]}

    def report_sections(self, trainer: Trainer) -> list[Section]:
        if not self._rollbacks:
            return [Section("Spikes", [Text("No loss spiked.")])]
        # The table counts steps from 1, as charts do.
        header = ["spike in step", "its loss", "mean before it", "seen after step", "back to the weights after step"]
        rows = [[int(r["spike"]) + 1, r["loss"], r["mean"], int(r["step"]), int(r["to"])] for r in self._rollbacks]
        return [Section("Spikes", [Text(f"Rollbacks: {len(rows)}."), Table(header, rows)])]
