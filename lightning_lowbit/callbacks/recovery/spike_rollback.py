"""Going back from a spike of the training loss to weights from before it, while the data go on.

    loss of step i      what the updates 0 … i-1 have made of the weights, and what batch i is like
    snapshot at S       weights with the updates 0 … S-1, a candidate until the losses of steps S … S + good_for - 1
                        were good

A bad update shows in the loss of its own batch, or of one of the next. So a snapshot that was just taken may hold it,
and there are two: the last one that has proved good, and a candidate. Only to the former one goes back.

    on_train_batch_end      of a step: its loss, summed over ranks, sets out for the host; nobody waits
    on_train_batch_start    of the next but one it has arrived, and is judged. So one more step is taken, and undone
"""

import math
from collections import deque
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit._lightning import (
    DeepSpeedStrategy,
    LightningModule,
    MisconfigurationException,
    Trainer,
    is_logging_step,
    is_mid_step,
    rank_zero_warn,
)
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.learning_rates import LowerRates
from lightning_lowbit.callbacks.recovery.snapshots import Snapshot, Trained, forget_gathered
from lightning_lowbit.distributed import local
from lightning_lowbit.nn.casts import PHASES
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.loss_scaling import scaler_of
from lightning_lowbit.quant.cast import choose, is_number
from lightning_lowbit.report.html import Section, Table, Text

# A deviation counts as this share of the mean at least: a loss that hardly moves would spike at every rounding error.
_LEAST_DEVIATION = 0.01


class SpikeRollback(LowBitCallback):
    """Undoes the steps around a spike of the training loss, and leaves out their batches.

    A loss spikes where it is not finite, or above ``mean + threshold · max(deviation, 0.01 · |mean|)`` of the last
    ``history`` good ones; before ``warmup_steps`` good ones were seen, only where it is not finite. It is the mean over
    the micro-batches of an optimizer step and over ranks: what the step descends. Spikes are no part of the statistics.
    With six deviations, one in 10⁹ normally distributed losses is a false alarm, and one in 36 of any distribution at
    most (Chebyshev); a falling loss makes the mean larger than what is to be expected, and the alarm a later one.

    Then weights and buffers, the optimizer's state, the loss scale of fp16 and the amaxes of delayed scaling become
    what they were in the last good snapshot, in place. What counts goes on: ``global_step``, the batches, the
    precision plugin's step. So do learning-rate schedules and switches, which follow ``global_step``: a schedule that
    was put back, too, would not be over at the end of the run. Of the options in an optimizer's groups, learning rates,
    betas, momentum and weight decay stay, for the same reason. Skipping batches, not only going back, is what ended
    spikes in PaLM (arXiv 2204.02311, section 5.1), with a snapshot 100 steps before the spike.

    The next ``recovery_steps`` optimizer steps may be taken with a smaller learning rate, or in a phase of higher
    precision; a :class:`PrecisionSwitch` that acts meanwhile has the last word.

    A snapshot is taken every ``every_n_steps`` optimizer steps, and where training starts, or is resumed. It proves
    good once the losses of ``good_for`` steps from there on were good, so that a spike may show ``good_for`` steps
    after the update that is to blame. **Memory**: two snapshots, each as large as the parameters, buffers and the
    optimizer's state on this rank; with AdamW in float32 24 bytes per parameter. **Time**: one copy of it; on one core,
    for 4 million parameters with AdamW (50 MB), 3 ms to take one and 2.5 ms to go back. ``device="cpu"`` keeps them on
    the host; to take one, this waits for the device.

    Losses are read one step late, without waiting for the device: after a bad step one more is taken, and undone, too.
    Before a validation, at the end of an epoch and of training all are judged at once. A checkpoint that is saved
    elsewhere, such as ``every_n_train_steps``, may come too early; resuming from one says so. State in a checkpoint:
    statistics, rollbacks, and what is in force. No snapshot: a resumed run takes a new one of what was loaded.

    Logged: ``spike_rollback/rollbacks``, how many; ``spike_rollback/mean``, and ``spike_rollback/limit``, above which a
    loss is a spike, both as they were judged last.

    Args:
        threshold: of the loss, in standard deviations above the mean, above 0.
        history: the number of good losses that mean and deviation are those of, at least 2.
        warmup_steps: good losses before spikes are looked for, at least 2.
        every_n_steps: optimizer steps between snapshots, at least 1.
        good_for: good steps that prove a snapshot, fewer than ``every_n_steps``.
        device: where snapshots are kept: ``"same"`` as what is copied, or ``"cpu"``.
        recovery_steps: optimizer steps with ``lr_factor`` and ``phase`` after a rollback, at least 1.
        lr_factor: what learning rates are multiplied with in these steps, in (0, 1].
        phase: of the precision in these steps, such as ``"bf16"``; None: as it is.
        max_rollbacks: how many there may be within ``within`` steps, and to one and the same snapshot, at least 1.
        within: a number of optimizer steps, at least 1.

    Raises:
        ValueError: an argument is out of range.
        MisconfigurationException: when training starts: manual optimization, DeepSpeed, or ``phase`` without a
            :class:`LowBitPrecision`.
        RuntimeError: there would be one more rollback than ``max_rollbacks`` (the weights are put back before), or
            there is nothing to go back to: the checkpoint of a resumed run was saved after the spike.

    Example:
        >>> Trainer(plugins=[FP4Precision()], callbacks=[SpikeRollback(phase="bf16", lr_factor=0.5)])
    """

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
        if not is_number(threshold) or not 0 < threshold < math.inf:
            raise ValueError(f"threshold is a number of standard deviations, above 0; got {threshold!r}.")
        for name, count, least in (
            ("history", history, 2),
            ("warmup_steps", warmup_steps, 2),
            ("every_n_steps", every_n_steps, 1),
            ("good_for", good_for, 0),
            ("recovery_steps", recovery_steps, 1),
            ("max_rollbacks", max_rollbacks, 1),
            ("within", within, 1),
        ):
            if type(count) is not int or count < least:
                raise ValueError(f"{name} is a whole number, {least} or more; got {count!r}.")
        if good_for >= every_n_steps:
            raise ValueError(
                "A snapshot proves good before the next one is taken: good_for is less than every_n_steps; got "
                f"{good_for=}, {every_n_steps=}."
            )
        if not is_number(lr_factor) or not 0 < lr_factor <= 1:
            raise ValueError(f"lr_factor is what remains of learning rates, above 0 and at most 1; got {lr_factor!r}.")
        self.threshold, self.history, self.warmup_steps = threshold, history, warmup_steps
        self.every_n_steps, self.good_for = every_n_steps, good_for
        self.device = choose("device of snapshots", device, ("same", "cpu"))
        self.recovery_steps, self.lr_factor = recovery_steps, lr_factor
        self.phase = None if phase is None else choose("phase", phase, PHASES)
        self.max_rollbacks, self.within = max_rollbacks, within
        self._parameters: list[Tensor] = []
        self._plugin: Any = None
        self._lowered: list[LowerRates] = []
        self._losses: list[Tensor] = []  # of the micro-batches of the step under way
        self._begins_step = True
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._good: deque[float] = deque(maxlen=self.history)
        self._seen = 0  # good losses, also those that have left the history
        self._pending: deque[_Loss] = deque()  # not judged yet
        self._rollbacks: list[dict[str, float]] = []
        self._until: int | None = None  # the step that ends the recovery; None where there is none
        self._phase_before: str | None = None
        # How often the plugin's phase was set when it was set here; None: as often as it is when training goes on.
        self._phases_set: int | None = -1
        self._trusted, self._candidate = Snapshot(self.device), Snapshot(self.device)

    # --- when ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets another run."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.global_step == 0:  # or else the same Trainer goes on; checkpoints come later
            self._start_afresh()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the parameters, now: after a sanity check FSDP may not have taken apart again what it gathered."""
        name, plugin = type(self).__name__, trainer.precision_plugin
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"{name} needs to know which losses belong to an optimizer step, which in manual optimization only "
                "training_step does. Use automatic optimization, or leave out the callback."
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                f"{name} copies parameters and optimizer states, of which DeepSpeed keeps its own. Use DDP, "
                "FSDPStrategy or ModelParallelStrategy, or leave out the callback."
            )
        if self.phase is not None and not isinstance(plugin, LowBitPrecision):
            raise MisconfigurationException(
                f"{name}(phase={self.phase!r}) sets the phase of a LowBitPrecision plugin, but the Trainer has "
                f"{type(plugin).__name__}. Use e.g. Trainer(plugins=[FP4Precision()]), or leave out phase."
            )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        optimized = [parameter for group in groups for parameter in group["params"]]
        self._parameters = list(dict.fromkeys([*optimized, *pl_module.parameters()]))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the first snapshot, which there is nothing before, and goes on with a recovery."""
        self._trusted.take(trainer.global_step, self._trained(trainer))
        self._candidate.step = None
        self._begins_step, self._losses = True, []
        self._plugin = trainer.precision_plugin
        if self._phases_set is None:
            self._phases_set = self._times_set
        if self._until is not None:
            self._begin_recovery(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Before an optimizer step: judges the loss of the last but one, and takes a snapshot if it is time."""
        if not self._begins_step:
            return
        self._judge(trainer, leave=1)
        self._begins_step, step = False, trainer.global_step
        if self._until is not None and step >= self._until:
            self._end_recovery()
            self._until = None
        if step % self.every_n_steps == 0 and step > (self._trusted.step or 0):
            self._candidate.take(step, self._trained(trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        """Adds up the losses of micro-batches; after the step the sum sets out for the host."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):  # or else training_step returned None
            self._losses.append(local(loss).detach().float().reshape(()))
        if is_mid_step(trainer):
            return
        self._begins_step = True
        # Lightning has divided each by the number of micro-batches that a step has, of which the last one of an epoch
        # may have fewer. Where a rank has none, it takes part all the same.
        none = torch.zeros((), device=trainer.strategy.root_device)
        total = sum(self._losses, none) * trainer.accumulate_grad_batches
        values = torch.stack([total, none + len(self._losses)])
        self._losses = []
        values = trainer.strategy.reduce(values, reduce_op="sum")
        self._pending.append(_Loss.send(trainer.global_step - 1, values))
        if is_logging_step(trainer):
            numbers: dict[str, float] = {"rollbacks": len(self._rollbacks)}
            if self._seen >= self.warmup_steps:
                numbers |= {"mean": fmean(self._good), "limit": self._limit()}
            metrics = {f"spike_rollback/{name}": torch.tensor(float(value)) for name, value in numbers.items()}
            pl_module.log_dict(metrics, batch_size=1)  # tensors on the host: a float would be copied to the device

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validates, and saves, what has been judged; not amid micro-batches, whose gradients are those of before."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self._begins_step:
            self._judge(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judges all steps of the epoch, before a checkpoint is saved."""
        self._judge(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judges the last steps, and leaves everything as it was; a run that goes on goes on with the recovery."""
        self._judge(trainer)
        if self._until is not None:
            self._end_recovery()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lets go of the optimizer, with its own learning rates, also if its step broke off."""
        self._release_rates()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lets go of the snapshots' memory; a run that goes on takes a new one."""
        self._parameters, self._trusted, self._candidate = [], Snapshot(self.device), Snapshot(self.device)

    # --- what a spike is ---

    def _limit(self) -> float:
        mean = fmean(self._good)
        return mean + self.threshold * max(pstdev(self._good, mean), _LEAST_DEVIATION * abs(mean))

    def _judge(self, trainer: Trainer, leave: int = 0) -> None:
        while len(self._pending) > leave:
            pending = self._pending.popleft()
            loss = pending.read()
            if loss is None:
                continue
            if not math.isfinite(loss) or (self._seen >= self.warmup_steps and loss > self._limit()):
                self._pending.clear()
                self._roll_back(trainer, pending.step, loss)
                return
            self._good.append(loss)
            self._seen += 1
            if self._candidate.step is not None and pending.step >= self._candidate.step + self.good_for - 1:
                self._trusted, self._candidate = self._candidate, self._trusted
                self._candidate.step = None

    # --- going back ---

    def _roll_back(self, trainer: Trainer, spike: int, loss: float) -> None:
        step, to = trainer.global_step, self._trusted.step
        assert to is not None
        mean = fmean(self._good) if self._good else math.nan
        told = f"The loss of step {spike} is {loss:.4g}, and {mean:.4g} in the mean of {len(self._good)} before it"
        if spike < to:
            raise RuntimeError(
                f"{told}; the checkpoint from which this run was resumed was saved after it, at step {to}, and there "
                "is nothing to go back to: resume from an earlier one."
            )
        self._trusted.put_back(self._trained(trainer))
        if trainer.model is not None:
            forget_gathered(trainer.model)
        self._candidate.step = None
        since = [one for one in self._rollbacks if one["step"] > step - self.within or one["to"] == to]
        if len(since) >= self.max_rollbacks:
            raise RuntimeError(
                f"{told}. {type(self).__name__} has gone back {len(since)} times since step {since[0]['step']}, and "
                f"max_rollbacks is {self.max_rollbacks}: it is no batch that is to blame. The weights are those of "
                f"step {to}. Lower the learning rate, raise the precision, or look at the data from step {spike} on."
            )
        self._rollbacks.append({"step": step, "spike": spike, "loss": loss, "mean": mean, "to": to})
        if self._until is not None:
            self._end_recovery()
        self._until = step + self.recovery_steps
        self._phase_before, self._phases_set = getattr(self._plugin, "phase", None), self._times_set
        self._begin_recovery(trainer)
        rank_zero_warn(
            f"{type(self).__name__}: {told}. Step {step} goes on with the weights of step {to}; the batches in between "
            "are left out."
        )

    def _trained(self, trainer: Trainer) -> Trained:
        plugin = trainer.precision_plugin
        histories = plugin.histories if isinstance(plugin, LowBitPrecision) else None
        # With a state_dict, the same on all ranks; of the plugin neither its counters nor its phase.
        others = [one for one in (scaler_of(plugin), histories) if one is not None]
        return Trained([*self._parameters, *trainer.lightning_module.buffers()], trainer.optimizers, others)

    # --- for some steps ---

    @property
    def _times_set(self) -> int:
        return self._plugin.phases_set if isinstance(self._plugin, LowBitPrecision) else 0

    @property
    def _is_phase_ours(self) -> bool:
        """Whether nobody else, such as a switch, has set the phase in this recovery, be it to the same one."""
        return self._phases_set is None or self._phases_set == self._times_set

    def _set_phase(self, phase: str | None) -> None:
        if self.phase is not None and self._is_phase_ours:
            self._plugin.set_phase(phase)
            self._phases_set = self._times_set

    def _begin_recovery(self, trainer: Trainer) -> None:
        self._set_phase(self.phase)
        if self.lr_factor < 1:
            self._lowered = [LowerRates(optimizer, self.lr_factor) for optimizer in trainer.optimizers]

    def _end_recovery(self) -> None:
        self._set_phase(self._phase_before)
        self._release_rates()

    def _release_rates(self) -> None:
        for lowered in self._lowered:
            lowered.release()
        self._lowered = []

    # --- what is left of it ---

    def state_dict(self) -> dict[str, Any]:
        """Statistics, rollbacks and what is in force, in primitives; losses that were not judged yet are waited for."""
        return {
            "good": list(self._good),
            "seen": self._seen,
            "pending": [(one.step, one.read()) for one in self._pending],
            "rollbacks": [dict(one) for one in self._rollbacks],
            "until": self._until,
            "phase_before": self._phase_before,
            "is_phase_ours": self._until is not None and self._is_phase_ours,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with it; of good losses, with as many of the last ones as this one looks at."""
        self._good = deque(state_dict["good"], maxlen=self.history)
        self._seen, self._until = state_dict["seen"], state_dict["until"]
        self._pending = deque(_Loss.known(step, loss) for step, loss in state_dict["pending"])
        self._rollbacks = [dict(one) for one in state_dict["rollbacks"]]
        self._phase_before, self._phases_set = state_dict["phase_before"], None if state_dict["is_phase_ours"] else -1

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        """The rollbacks: at which step, the step whose loss spiked, that loss, the mean before it, and where to."""
        return {"rollbacks": [dict(one) for one in self._rollbacks]}

    def report_sections(self, trainer: Trainer) -> list[Section]:
        """The same as a table."""
        if not self._rollbacks:
            return [Section("Spikes", [Text("No loss spiked.")])]
        # The first step is that before which none was taken; charts, and so this table, count it as step 1.
        header = ["spike in step", "its loss", "mean before it", "seen after step", "back to the weights after step"]
        rows = [[int(r["spike"]) + 1, r["loss"], r["mean"], int(r["step"]), int(r["to"])] for r in self._rollbacks]
        return [Section("Spikes", [Text(f"Rollbacks: {len(rows)}."), Table(header, rows)])]


class _Loss(NamedTuple):
    """The loss of an optimizer step, on its way to the host.

    Attributes:
        step: the optimizer steps before it.
        values: the sum over micro-batches and ranks, and how many these were, float32, ``[2]``.
        arrived: None on the CPU.
    """

    step: int
    values: Tensor
    arrived: torch.Event | None = None

    @classmethod
    def send(cls, step: int, values: Tensor) -> "_Loss":
        if values.device.type == "cpu":
            return cls(step, values)
        arrived = torch.Event(values.device)
        values = values.to("cpu", non_blocking=True)
        arrived.record()
        return cls(step, values, arrived)

    @classmethod
    def known(cls, step: int, loss: float | None) -> "_Loss":
        return cls(step, torch.tensor([0.0, 0.0] if loss is None else [loss, 1.0], device="cpu"))

    def read(self) -> float | None:
        """The mean; None where no training step returned a loss."""
        if self.arrived is not None:
            self.arrived.synchronize()
        total, count = self.values.tolist()
        return total / count if count else None
