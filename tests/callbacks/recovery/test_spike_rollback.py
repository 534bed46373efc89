"""After a rollback a run is the one that never saw the batches in between: to the bit, since all that an update depends
on went back, and nothing else did."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_lowbit import (
    ConservativeGradScaler,
    FP8Precision,
    LowBitPrecision,
    PrecisionSwitch,
    RunReport,
    SpikeRollback,
)
from lightning_lowbit.optim import Adaptive, LowBitAdamW, StableSPAM
from tests.callbacks.recovery.ranks_spike_rollback import RUNS
from tests.launch import launch
from tests.lightnings import (
    BoringModel,
    Callback,
    DeepSpeedStrategy,
    LightningCLI,
    LightningModule,
    MisconfigurationException,
    MixedPrecision,
    TensorBoardLogger,
    Trainer,
)
from tests.pairs import selected

BAD = 11
# A snapshot before step 8, and step 12 is taken before the loss of 11 is read.
KEPT = [*range(8), *range(13, 20)]
RESUMING = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


class SGD(torch.optim.SGD):
    """Notes the learning rate of each step, for which torch calls hooks twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch.optim.SGD([torch.zeros(1)])  # it is the first one of a class that makes its step call hooks
        super().__init__(*args, **kwargs)
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.rates.append(self.param_groups[0]["lr"])
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=1e-2),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "StableSPAM": lambda p: StableSPAM(p, lr=1e-2, reset_interval=5, weight_decay=0.1),
    "LowBitAdamW": lambda p: LowBitAdamW(p, lr=1e-2),
    "Adaptive": lambda p: Adaptive(torch.optim.AdamW(p, lr=1e-2)),
}


class Scripted(LightningModule):
    """Learns from batches of which each has a number; some of them are bad.

    Args:
        numbers: of the batches, in their order.
        bad: what is wrong with which: "spike": targets are off; "nan": the loss; "late": the gradient alone.
        optimizer: of `OPTIMIZERS`.
        scheduler: makes one, for each step.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        bad: Mapping[int, str] | None = None,
        optimizer: str = "SGD",
        scheduler: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
        self.numbers, self.bad, self.optimizer, self.scheduler = list(numbers), dict(bad or {}), optimizer, scheduler
        self.losses: list[float] = []
        self.phases: list[str] = []
        self.made: Any = None
        self.end: Any = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        number = self.numbers[self.trainer.fit_loop.epoch_loop.total_batch_idx]
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 16, generator=generator)
        y = x[:, :1] + 0.3 * torch.randn(8, 1, generator=generator)
        kind = self.bad.get(number)
        loss = F.mse_loss(self.body(x).float(), y * (1e4 if kind == "spike" else 1))
        if kind == "nan":
            loss = loss * math.nan
        if kind == "late":
            steep = 1e6 * sum(parameter.float().sum() for parameter in self.parameters())
            loss = loss + (steep - steep.detach())
        self.losses.append(float(loss.detach()))
        self.phases.append(getattr(self.trainer.precision_plugin, "phase", ""))
        return loss

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(len(self.numbers)))

    def configure_optimizers(self) -> Any:
        self.made = OPTIMIZERS[self.optimizer](self.parameters())
        if self.scheduler is None:
            return self.made
        return [self.made], [{"scheduler": self.scheduler(self.made), "interval": "step"}]

    def on_train_end(self) -> None:
        self.end = self.everything()

    def everything(self) -> Any:
        """Copies of weights, buffers and optimizer state."""
        weights = {name: value.clone() for name, value in self.state_dict().items()}
        state = [{name: _clone(value) for name, value in kept.items()} for kept in self.made.state.values()]
        return weights, state


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def rollback(**kwargs: Any) -> SpikeRollback:
    """Armed early, with snapshots before each fourth step."""
    return SpikeRollback(**{"warmup_steps": 4, "every_n_steps": 4, "good_for": 1, **kwargs})


def trainer(*callbacks: Callback, plugin: Any = None, **kwargs: Any) -> Trainer:
    defaults = {
        "max_epochs": 1,
        "logger": False,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    plugins = None if plugin is None else [plugin]
    return Trainer(accelerator="cpu", callbacks=list(callbacks), plugins=plugins, **{**defaults, **kwargs})


def fit(model: Scripted, *callbacks: Callback, **kwargs: Any) -> Scripted:
    trainer(*callbacks, **kwargs).fit(model)
    return model


def steps(callback: SpikeRollback) -> list[tuple[float, ...]]:
    """(at which step, whose loss, where to) of each rollback."""
    return [tuple(one[name] for name in ("step", "spike", "to")) for one in callback.state_dict()["rollbacks"]]


def assert_same(found: Any, wanted: Any, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


# --- where it ends ----------------------------------------------------------------------------------------------------


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("device", ["same", "cpu"])
@pytest.mark.parametrize("kind", ["spike", "nan"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ends_as_the_run_that_never_saw_the_batches(optimizer: str, kind: str, device: str) -> None:
    callback = rollback(device=device)
    with pytest.warns(UserWarning, match="SpikeRollback: The loss of step 11 is .* goes on with the weights of step 8"):
        model = fit(Scripted(range(20), {BAD: kind}, optimizer), callback)
    assert steps(callback) == [(13, 11, 8)]
    assert_same(model.end, fit(Scripted(KEPT, optimizer=optimizer)).end, "not the run without these batches")


@pytest.mark.parametrize("kind", ["spike", "nan"])
def test_without_it_the_run_is_lost(kind: str) -> None:
    """And with it the loss ends where it would have without the batch: within a quarter, since five of 20 steps are
    missing."""
    clean = fit(Scripted(range(40))).losses
    lost = fit(Scripted(range(40), {30: kind})).losses
    with pytest.warns(UserWarning, match="SpikeRollback"):
        kept = fit(Scripted(range(40), {30: kind}), rollback()).losses
    end, ends = sum(clean[-5:]), (sum(lost[-5:]), sum(kept[-5:]))
    assert not ends[0] < 10 * end, f"without the callback the run goes on: {ends[0]} against {end}"
    assert ends[1] == pytest.approx(end, rel=0.25), f"with the callback {ends[1]}, without the batch {end}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_a_spike_nothing_changes(optimizer: str) -> None:
    callback = rollback(lr_factor=0.5)
    found = fit(Scripted(range(20), optimizer=optimizer), callback)
    assert steps(callback) == []
    assert_same(found.end, fit(Scripted(range(20), optimizer=optimizer)).end, "watching changed the run")


def test_a_state_that_appeared_since_goes() -> None:
    """To the very beginning, before which an optimizer has none."""
    callback = rollback()
    with pytest.warns(UserWarning, match="weights of step 0"):
        model = fit(Scripted(range(10), {1: "nan"}, "AdamW"), callback)
    assert steps(callback) == [(3, 1, 0)]
    assert_same(model.end, fit(Scripted(range(3, 10), optimizer="AdamW")).end, "something was left")


def test_objects_stay() -> None:
    """Parameters and tensors of states are filled, not replaced."""

    class Addresses(Callback):
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def on_train_batch_end(self, run: Trainer, module: Any, *_: Any) -> None:
            state = [value for kept in module.made.state.values() for value in kept.values()]
            self.seen.append([value.data_ptr() for value in (*module.parameters(), *state)])

    addresses = Addresses()
    with pytest.warns(UserWarning, match="SpikeRollback"):
        fit(Scripted(range(20), {BAD: "spike"}, "AdamW"), rollback(), addresses)
    assert all(a == b for a, b in pairwise(addresses.seen)), "a tensor was replaced"


# --- which snapshot ---------------------------------------------------------------------------------------------------


def test_a_snapshot_with_the_bad_update_is_not_gone_back_to() -> None:
    """The update of step 8 is bad and its loss is not; the snapshot of step 9 holds it, which only the loss of 9 tells
    of."""
    callback = rollback(every_n_steps=3)
    with pytest.warns(UserWarning, match="The loss of step 9 .* weights of step 6"):
        model = fit(Scripted(range(20), {8: "late"}), callback)
    assert steps(callback) == [(11, 9, 6)]
    assert_same(model.end, fit(Scripted([*range(6), *range(11, 20)])).end, "not the run without these batches")


def test_a_candidate_with_the_bad_update_does_not_prove_good_later() -> None:
    """The snapshot of step 12 holds the update of step 11; after the rollback losses are good again, until step 15."""
    callback = rollback()
    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(Scripted(range(20), {11: "spike", 15: "spike"}), callback)
    assert steps(callback) == [(13, 11, 8), (17, 15, 8)]
    assert_same(model.end, fit(Scripted([*range(8), *range(17, 20)])).end, "not the run without these batches")


def test_trusting_a_snapshot_too_early_shows_why_one_waits() -> None:
    with (
        pytest.warns(UserWarning, match="weights of step 9"),
        pytest.raises(RuntimeError, match="it is no batch that is to blame"),
    ):
        fit(Scripted(range(40), {8: "late"}), rollback(every_n_steps=3, good_for=0))


@pytest.mark.parametrize(("good_for", "to"), [(0, 8), (2, 8), (3, 8), (4, 0), (7, 0)])
def test_a_snapshot_proves_good(good_for: int, to: int) -> None:
    """Of the snapshot of step 8, where the losses of 8, 9 and 10 are good and that of 11 is not. That of 0 precedes."""
    callback = rollback(good_for=good_for, every_n_steps=8)
    with pytest.warns(UserWarning, match=f"weights of step {to}"):
        fit(Scripted(range(20), {BAD: "nan"}), callback)


# --- what a spike is --------------------------------------------------------------------------------------------------


def test_only_what_is_not_finite_counts_before_it_is_armed() -> None:
    callback = rollback(warmup_steps=12)
    fit(Scripted(range(20), {BAD: "spike"}, "AdamW"), callback)
    assert steps(callback) == []
    with pytest.warns(UserWarning, match="SpikeRollback"):
        fit(Scripted(range(20), {BAD: "nan"}, "AdamW"), callback)
    assert steps(callback) == [(13, 11, 8)]


class Losses(BoringModel):
    """Has the losses it is given, whatever the weights."""

    def __init__(self, losses: Sequence[float]) -> None:
        super().__init__()
        self.losses = losses

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.losses[batch_idx]
        return None if math.isnan(loss) else self.layer(batch).sum() * 0 + loss

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(len(self.losses), 32))


def is_spike(*losses: float, accumulate: int = 1, **kwargs: Any) -> bool:
    callback = rollback(**{"warmup_steps": 2, **kwargs})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SpikeRollback")
        warnings.filterwarnings("ignore", "`training_step` returned `None`")
        trainer(callback, limit_val_batches=0, accumulate_grad_batches=accumulate).fit(Losses(losses))
    return bool(steps(callback))


def test_the_rule() -> None:
    """Mean 2 and deviation 1 of 1 and 3; of 2 and 2 the deviation counts as 0.02. Bounds are those of float32."""
    assert is_spike(1, 3, 8.01)
    assert not is_spike(1, 3, 7.99)
    assert is_spike(2, 2, 2.1201)
    assert not is_spike(2, 2, 2.1199)
    assert is_spike(1, 3, 5.01, threshold=3.0)
    assert is_spike(-2, -2, -1.8799), "a mean below 0"
    assert not is_spike(-2, -2, -1.8801)
    assert is_spike(1, 3, -math.inf)
    assert not is_spike(1, 3, -1e6), "below the mean there is no spike"
    assert is_spike(9, 1, 3, 8.01, history=2), "the 9 is too long ago to count"
    assert not is_spike(9, 1, 3, 8.01, history=3)


def test_the_loss_is_the_mean_over_micro_batches() -> None:
    """Also in the last step of an epoch, which has one of two; and where one of them has no loss."""
    steady = [1, 3, 3, 1, 2, 2]  # means of 2, 2, 2
    assert not is_spike(*steady, 2.11, accumulate=2), "the lone micro-batch counts as half a step, or twice"
    assert is_spike(*steady, 2.13, accumulate=2)
    assert is_spike(*steady, 1.13, 3.13, accumulate=2)
    assert not is_spike(*steady, 1.11, 3.11, accumulate=2)
    assert not is_spike(*steady, math.nan, 2.11, accumulate=2), "a micro-batch without a loss was counted"
    assert not is_spike(*steady, math.nan, math.nan, accumulate=2), "no loss is no spike"
    callback = rollback()
    trainer(callback, limit_val_batches=0, accumulate_grad_batches=2).fit(Losses([1, 3, 4, 5, 6]))
    assert callback.state_dict()["good"] == [2, 4.5, 6]


def test_goes_back_between_steps_with_micro_batches() -> None:
    callback = rollback()
    with pytest.warns(UserWarning, match="The loss of step 11 .* goes on with the weights of step 8"):
        model = fit(Scripted(range(40), {2 * BAD: "spike"}), callback, accumulate_grad_batches=2)
    kept = [2 * step + half for step in KEPT for half in (0, 1)]
    assert_same(model.end, fit(Scripted(kept), accumulate_grad_batches=2).end, "not the run without these batches")


@pytest.mark.parametrize("at", [18, 19])
def test_the_last_steps_are_judged_too(at: int) -> None:
    callback = rollback()
    with pytest.warns(UserWarning, match=f"The loss of step {at} .* weights of step 16"):
        model = fit(Scripted(range(20), {at: "spike"}), callback)
    assert_same(model.end, fit(Scripted(range(16))).end, "the run ends with a bad update")


def test_validates_what_has_been_judged() -> None:
    class Validated(Scripted):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                self.validated.append(self.everything())

        def val_dataloader(self) -> DataLoader:
            return DataLoader(range(1))

    model = Validated(range(12), {BAD: "spike"})
    model.validated = []
    with pytest.warns(UserWarning, match="The loss of step 11 .* Step 12 goes on with the weights of step 8"):
        fit(model, rollback(), val_check_interval=4)
    assert len(model.validated) == 3
    assert_same(model.validated[-1], fit(Scripted(range(8))).end, "the bad update was validated")


def test_nothing_is_read_within_a_step_and_nothing_of_the_last_one() -> None:
    """A number of a tensor is what a device has to be waited for. The one that is read is older than a step."""
    judged: list[tuple[int, int]] = []

    class Watched(SpikeRollback):
        def on_train_batch_start(self, run: Trainer, *args: Any) -> None:
            before = [one.step for one in self._losses.pending]
            super().on_train_batch_start(run, *args)
            after = [one.step for one in self._losses.pending]
            judged.extend((run.global_step, step) for step in before if step not in after)

        def on_train_batch_end(self, *args: Any) -> None:
            class Refuse(TorchDispatchMode):
                def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                    assert func is not torch.ops.aten._local_scalar_dense.default, "a number was read"
                    return func(*args, **(kwargs or {}))

            with Refuse():
                super().on_train_batch_end(*args)

    fit(Scripted(range(10)), Watched(warmup_steps=2))
    assert judged == [(step, step - 2) for step in range(2, 10)]


# --- what else goes back ----------------------------------------------------------------------------------------------


def scaled() -> ConservativeGradScaler:
    return ConservativeGradScaler(init_scale=2.0**4, growth_interval=3, cooldown=1, device="cpu")


PLUGINS: dict[str, Callable[[], Any]] = {
    "fp8, delayed": lambda: FP8Precision("delayed", compute_dtype="fp32"),
    "fp16": lambda: LowBitPrecision("bf16", compute_dtype="fp16", scaler=scaled()),
    "fp16, fp8, delayed": lambda: FP8Precision("delayed", compute_dtype="fp16", scaler=scaled()),
    "Lightning's": lambda: MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**4, growth_interval=3)),
}


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_the_scaler_and_the_amaxes_go_back_and_counters_go_on(plugin: Callable[[], Any]) -> None:
    """Random bits differ, of which these casts have none: they round to nearest."""
    ends = []
    for numbers, callbacks in ((range(20), [rollback()]), (KEPT, [])):
        used = plugin()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "SpikeRollback")
            run = trainer(*callbacks, plugin=used)
            run.fit(model := Scripted(numbers, {BAD: "spike"}, "AdamW"))
        assert run.global_step == len(numbers)
        assert getattr(used, "step", run.global_step) == run.global_step, "the plugin's step went back"
        histories = used.histories.state_dict() if isinstance(used, LowBitPrecision) else {}
        ends.append((model.end, None if used.scaler is None else used.scaler.state_dict(), histories))
    assert_same(*ends, "not the run without these batches")


def test_schedules_go_on() -> None:
    """One that computes a learning rate from the last one, too."""
    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(
            Scripted(range(20), {BAD: "nan"}, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)),
            rollback(),
        )
    assert model.made.rates == pytest.approx([1e-2 * 0.9**step for step in range(20)])


def test_what_an_optimizer_keeps_in_its_groups_goes_back_and_what_is_scheduled_stays() -> None:
    class Counts(Callback):
        def on_train_batch_end(self, run: Trainer, module: Any, *_: Any) -> None:
            group = module.made.param_groups[0]
            group["k"] = group.get("k", 0) + 1
            group["weight_decay"] = run.global_step / 1000

    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(Scripted(range(20), {BAD: "nan"}), rollback(), Counts())
    assert model.made.param_groups[0]["k"] == 15, "20 steps, of which five were undone"
    assert model.made.param_groups[0]["weight_decay"] == 0.02


# --- for some steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["ExponentialLR", "LambdaLR"])
def test_learning_rates_are_lower_for_some_steps(make: str) -> None:
    def scheduler(optimizer: Any) -> Any:
        if make == "ExponentialLR":
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(Scripted(range(20), {BAD: "nan"}, scheduler=scheduler), rollback(lr_factor=0.25, recovery_steps=3))
    factors = [rate / (1e-2 * 0.9**step) for step, rate in enumerate(model.made.rates)]
    assert factors == pytest.approx([1.0] * 13 + [0.25] * 3 + [1.0] * 4)
    assert model.made.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**20), "the schedule saw the factor"


def test_a_phase_for_some_steps() -> None:
    plugin = FP8Precision()
    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(Scripted(range(20), {BAD: "nan"}), rollback(phase="bf16", recovery_steps=3), plugin=plugin)
    assert model.phases == ["fqt"] * 13 + ["bf16"] * 3 + ["fqt"] * 4


def test_a_run_that_ends_meanwhile_ends_in_its_own_phase() -> None:
    plugin = FP8Precision()
    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(Scripted(range(16), {BAD: "nan"}), rollback(phase="bf16", lr_factor=0.5), plugin=plugin)
    assert model.phases[-1] == "bf16"
    assert plugin.phase == "fqt"
    assert not model.made._optimizer_step_pre_hooks, "the optimizer was not let go of"


@RESUMING
def test_a_switch_that_acts_meanwhile_has_the_last_word() -> None:
    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(
            Scripted(range(20), {BAD: "nan"}),
            rollback(phase="bf16", recovery_steps=4),
            PrecisionSwitch("qaf", step=15),
            Saves(16),
            plugin=FP8Precision(),
        )
    assert model.phases == ["fqt"] * 13 + ["bf16"] * 2 + ["qaf"] * 5
    model = resumed(Scripted(range(20)), rollback(phase="bf16", recovery_steps=4), plugin=FP8Precision())
    assert model.phases == ["qaf"] * 4, "a resumed run forgot the switch"


@RESUMING
def test_a_switch_to_the_phase_of_the_recovery_meanwhile_stays() -> None:
    def callbacks() -> list[Callback]:
        return [rollback(phase="bf16", recovery_steps=4), PrecisionSwitch("bf16", step=15)]

    whole = ["fqt"] * 13 + ["bf16"] * 7
    for at in (15, 16):
        with pytest.warns(UserWarning, match="SpikeRollback"):
            model = fit(Scripted(range(20), {BAD: "nan"}), *callbacks(), Saves(at), plugin=FP8Precision())
        assert model.phases == whole
        model = resumed(Scripted(range(20)), *callbacks(), plugin=FP8Precision())
        assert model.phases == whole[at:], f"resumed after step {at}"


@RESUMING
@pytest.mark.parametrize("first", [True, False])
def test_a_switch_from_before_leaves_a_resumed_recovery_alone(first: bool) -> None:
    """Whatever the order of the callbacks."""

    def callbacks() -> list[Callback]:
        both = [rollback(phase="bf16", recovery_steps=4), PrecisionSwitch("qaf", step=3, steps=13)]
        return both if first else both[::-1]

    class Blends(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, run: Any, *_: Any) -> None:
            self.seen.append(float(run.precision_plugin.blend))

    blends = Blends()
    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(Scripted(range(20), {BAD: "nan"}), *callbacks(), Saves(14), blends, plugin=FP8Precision())
    whole = ["fqt"] * 3 + ["qaf"] * 10 + ["bf16"] * 4 + ["qaf"] * 3
    assert model.phases == whole
    again = Blends()
    model = resumed(Scripted(range(20)), *callbacks(), again, plugin=FP8Precision())
    assert model.phases == whole[14:]
    assert again.seen == blends.seen[14:], "λ did not go on"


@RESUMING
def test_a_longer_run_goes_on_with_the_recovery() -> None:
    """Saved at the end, in the phase of before."""
    run = trainer(rollback(phase="bf16", recovery_steps=6), plugin=FP8Precision(), max_steps=16)
    with pytest.warns(UserWarning, match="SpikeRollback"):
        run.fit(Scripted(range(24), {BAD: "nan"}))
    assert run.precision_plugin.phase == "fqt"
    run.save_checkpoint("saved.ckpt")
    settings = {"phase": "bf16", "recovery_steps": 6}
    model = resumed(Scripted(range(60)), rollback(**settings), plugin=FP8Precision(), max_epochs=2, max_steps=22)
    assert model.phases == ["bf16"] * 3 + ["fqt"] * 3


def test_learning_rates_are_its_own_after_a_step_that_broke_off() -> None:
    class Breaks(Scripted):
        def on_after_backward(self) -> None:
            if self.trainer.global_step == 14:
                raise KeyError("broken")

    model = Breaks(range(20), {BAD: "nan"})
    with pytest.warns(UserWarning, match="SpikeRollback"), pytest.raises(KeyError, match="broken"):
        fit(model, rollback(lr_factor=0.5))
    assert model.made.param_groups[0]["lr"] == 1e-2
    assert not model.made._optimizer_step_pre_hooks


# --- giving up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("within", [1, 1000])
def test_gives_up_without_progress(within: int) -> None:
    """From step 10 on all losses are bad: each time two more steps are taken; the good snapshot stays the same one."""
    callback, model = rollback(max_rollbacks=2, within=within), Scripted(range(40), dict.fromkeys(range(10, 40), "nan"))
    told = r"step 14 is nan.* has gone back 2 times since step 12, and max_rollbacks is 2.* those of step 8"
    with pytest.warns(UserWarning, match="SpikeRollback"), pytest.raises(RuntimeError, match=told):
        fit(model, callback)
    assert_same(model.everything(), fit(Scripted(range(8))).end, "the weights were not put back")


@pytest.mark.parametrize(("within", "gives_up"), [(16, False), (17, True)])
def test_gives_up_within_a_window_only(within: int, gives_up: bool) -> None:
    """Spikes at 8 and 24, and with them rollbacks at 10 and 26, from different snapshots."""
    model = Scripted(range(40), {8: "nan", 24: "nan"})
    with pytest.warns(UserWarning, match="SpikeRollback"):
        if gives_up:
            with pytest.raises(RuntimeError, match="max_rollbacks is 1"):
                fit(model, rollback(max_rollbacks=1, within=within))
        else:
            fit(model, rollback(max_rollbacks=1, within=within))


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Saves(Callback):
    """A checkpoint after a number of steps."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, run: Trainer, *_: Any) -> None:
        if run.global_step == self.at:
            run.save_checkpoint("saved.ckpt")


def resumed(model: Scripted, *callbacks: Callback, **kwargs: Any) -> Scripted:
    trainer(*callbacks, **kwargs).fit(model, ckpt_path="saved.ckpt", weights_only=True)
    return model


@RESUMING
@pytest.mark.parametrize("at", [13, 15, 16, 18])
def test_a_recovery_goes_on_in_a_resumed_run(at: int) -> None:
    settings = {"phase": "bf16", "lr_factor": 0.5, "recovery_steps": 4}
    with pytest.warns(UserWarning, match="SpikeRollback"):
        whole = fit(
            Scripted(range(20), {BAD: "nan"}), callback := rollback(**settings), Saves(at), plugin=FP8Precision()
        )
    if at == 13:  # saved before the loss of step 11 was read
        with pytest.raises(RuntimeError, match="saved after it, at step 13, .*: resume from an earlier one"):
            resumed(Scripted(range(20)), rollback(**settings), plugin=FP8Precision())
        return
    model = resumed(Scripted(range(20)), again := rollback(**settings), plugin=FP8Precision())
    assert model.phases == whole.phases[at:], "another phase"
    assert model.made.rates == whole.made.rates[at:], "another learning rate"
    assert_same(model.end, whole.end, "not the uninterrupted run")
    assert steps(again) == steps(callback)
    assert repr(again.state_dict()) == repr(callback.state_dict()), "NaNs are equal in words alone"


@RESUMING
def test_a_resumed_run_goes_back_to_where_it_was_resumed() -> None:
    fit(Scripted(range(20)), rollback(), Saves(9))
    callback = rollback(every_n_steps=50)
    with pytest.warns(UserWarning, match="The loss of step 11 .* weights of step 9"):
        model = resumed(Scripted(range(20), {BAD: "spike"}), callback)
    assert_same(model.end, fit(Scripted([*range(9), *range(13, 20)])).end, "not the run without these batches")


def test_another_run_starts_afresh() -> None:
    callback = rollback()
    for _ in range(2):
        with pytest.warns(UserWarning, match="SpikeRollback"):
            fit(Scripted(range(20), {BAD: "nan"}), callback)
        assert steps(callback) == [(13, 11, 8)]


# --- what is said of it -----------------------------------------------------------------------------------------------


def test_logged() -> None:
    run = trainer(rollback(), logger=TensorBoardLogger("."))
    with pytest.warns(UserWarning, match="SpikeRollback"):
        run.fit(model := Scripted(range(20), {BAD: "nan"}))
    run.logger.finalize("success")
    events = EventAccumulator(run.logger.log_dir).Reload()
    found = {
        name: {event.step: event.value for event in events.Scalars(f"spike_rollback/{name}")}
        for name in ("rollbacks", "mean", "limit")
    }
    assert found["rollbacks"] == {step: float(step >= 13) for step in range(20)}
    assert list(found["mean"]) == list(range(5, 20)), "after four good losses, the last of which is read in step 5"
    for step in (5, 12, 13):
        good = torch.tensor(model.losses[: min(step - 1, 11)], dtype=torch.float64)
        mean, limit = float(good.mean()), float(good.mean() + 6 * good.std(correction=0))
        assert found["mean"][step] == pytest.approx(mean, rel=1e-6)
        assert found["limit"][step] == pytest.approx(limit, rel=1e-6)


def test_reported() -> None:
    with pytest.warns(UserWarning, match="SpikeRollback"):
        fit(Scripted(range(20), {BAD: "nan"}), RunReport(), rollback())
    page = Path("report.html").read_text()
    assert "Spikes" in page
    assert "Rollbacks: 1." in page
    assert f'<td class="number">{BAD + 1}</td>' in page, "charts count the first step as 1"
    fit(Scripted(range(4)), RunReport(), rollback())
    assert "No loss spiked." in Path("version_1/report.html").read_text()


def test_from_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fit.py"])
    config = yaml.safe_load("""
        trainer:
          accelerator: cpu
          logger: false
          callbacks:
            - class_path: lightning_lowbit.callbacks.recovery.spike_rollback.SpikeRollback
              init_args: {threshold: 4, phase: bf16, lr_factor: 0.5, device: cpu}
    """)
    settings = {"run": False, "save_config_callback": None, "seed_everything_default": False}
    made = LightningCLI(BoringModel, args=config, **settings).trainer.callbacks
    (callback,) = (one for one in made if isinstance(one, SpikeRollback))
    found = (callback.threshold, callback.phase, callback.lr_factor, callback.device)
    assert found == (4, "bf16", 0.5, "cpu")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 0}, "threshold is a number of standard deviations, above 0; got 0"),
        ({"threshold": math.inf}, "above 0; got inf"),
        ({"threshold": math.nan}, "above 0; got nan"),
        ({"threshold": "6"}, "above 0; got '6'"),
        ({"history": 1}, "history is a whole number, 2 or more; got 1"),
        ({"warmup_steps": 1.0}, "warmup_steps is a whole number, 2 or more; got 1.0"),
        ({"every_n_steps": 0}, "every_n_steps is a whole number, 1 or more; got 0"),
        ({"good_for": -1}, "good_for is a whole number, 0 or more; got -1"),
        ({"good_for": True}, "good_for is a whole number, 0 or more; got True"),
        ({"every_n_steps": 20}, "good_for is less than every_n_steps; got good_for=20, every_n_steps=20"),
        ({"recovery_steps": 0}, "recovery_steps is a whole number, 1 or more; got 0"),
        ({"max_rollbacks": 0}, "max_rollbacks is a whole number, 1 or more; got 0"),
        ({"within": None}, "within is a whole number, 1 or more; got None"),
        ({"lr_factor": 0}, "above 0 and at most 1; got 0"),
        ({"lr_factor": 1.5}, "above 0 and at most 1; got 1.5"),
        ({"lr_factor": math.nan}, "above 0 and at most 1; got nan"),
        ({"device": "cuda"}, "Unknown device of snapshots 'cuda'.*'same', 'cpu'"),
        ({"phase": "fp32"}, "Unknown phase 'fp32'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpikeRollback(**arguments)


def test_manual_optimization() -> None:
    class Manual(BoringModel):
        automatic_optimization = False

    with pytest.raises(MisconfigurationException, match="Use automatic optimization, or leave out the callback"):
        trainer(SpikeRollback()).fit(Manual())


def test_a_phase_without_a_plugin() -> None:
    with pytest.raises(MisconfigurationException, match=r"the Trainer has Precision\. Use e\.g\. Trainer\(plugins="):
        fit(Scripted(range(2)), SpikeRollback(phase="bf16"))


def test_deepspeed() -> None:
    run = trainer()
    run.strategy.__class__ = type("Likewise", (DeepSpeedStrategy,), {})  # the package need not be installed
    with pytest.raises(MisconfigurationException, match="DeepSpeed keeps its own. Use DDP, FSDPStrategy"):
        SpikeRollback().on_fit_start(run, Scripted(range(2)))


# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rolled_back")
    return launch("tests.callbacks.recovery.ranks_spike_rollback", 2, folder, *selected(request, "run"))


@pytest.mark.fast(
    "ddp, adaptive, spike", "ddp, fp8, nan", "fsdp2, adaptive, nan", "fsdp2, fp8, spike", "fsdp1, adaptive, spike"
)
@pytest.mark.parametrize("run", RUNS)
def test_all_ranks_go_back_though_one_saw_the_bad_batch(results: list[dict[str, Any]], run: str) -> None:
    found = [result[run] for result in results]
    for rank, one in enumerate(found):
        assert one["steps"] == [[9, 7, 4]], f"rank {rank}"
        assert_same(one["weights"], one["clean"], f"rank {rank}: not the run without these batches")
    assert found[0]["good"] == found[1]["good"], "ranks have judged other losses"


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_state_of_an_earlier_version_loads(is_ours: bool) -> None:
    state = {
        "good": [3.0, 1.0, 2.0],
        "seen": 9,
        "pending": [(11, 2.5), (12, None)],
        "rollbacks": [{"step": 8, "spike": 6, "loss": 9.0, "mean": 2.0, "to": 4}],
        "until": 14,
        "phase_before": "fqt",
        "is_phase_ours": is_ours,
    }
    callback = rollback(phase="bf16", history=2)
    callback.load_state_dict(state)
    assert callback.state_dict() == {**state, "good": [1.0, 2.0]}
