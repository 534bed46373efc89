"""Progressive quantization: λ of each step, its schedules, its end, after a resume, and where a plateau starts it."""

import csv
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from lightning_lowbit import FP4Precision, LowBitPrecision, PrecisionSwitch, QAFSwitch
from lightning_lowbit.callbacks import Plateau
from lightning_lowbit.callbacks.switches.precision import SCHEDULES
from lightning_lowbit.nn.linear import QuantizedLayer
from tests.lightnings import (
    BoringModel,
    Callback,
    CSVLogger,
    LightningCLI,
    LightningModule,
    MisconfigurationException,
    Trainer,
)
from tests.precision.regression import Regression, flat, state, trainer, two_casts

# Short runs: many end in the middle of a switch.
pytestmark = pytest.mark.filterwarnings("ignore:Training ended at")


class Witness(Callback):
    """What is in force in each micro-batch, by optimizer step: the phase, and λ as the layers have it."""

    def __init__(self, keep: str | None = None) -> None:
        self.phases: dict[int, str] = {}
        self.blends: dict[int, float] = {}
        self.keep = keep

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        plugin, step = trainer.precision_plugin, trainer.global_step
        layers = [module for module in pl_module.modules() if isinstance(module, QuantizedLayer)]
        assert layers
        assert {layer.casts == layer.full_casts.phase(plugin.phase) for layer in layers} == {True}
        (blend,) = {1.0 if layer.blend is None else layer.blend.item() for layer in layers}
        assert blend == plugin.blend.item(), "the layers have another λ than the plugin"
        assert self.blends.setdefault(step, blend) == blend, f"λ changes within step {step}"
        assert self.phases.setdefault(step, plugin.phase) == plugin.phase

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "trained")

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, "validated")

    def _save(self, trainer: Any, when: str) -> None:
        if self.keep == when and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(f"{trainer.global_step}.ckpt")


class Validated(Regression):
    """Its validation says what it is told to, once and again the last."""

    def __init__(self, *said: float, name: str = "val_loss") -> None:
        super().__init__()
        self.said, self.name, self.done = said, name, 0

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log(self.name, self.said[min(self.done, len(self.said) - 1)])

    def on_validation_epoch_end(self) -> None:
        self.done += not self.trainer.sanity_checking

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["done"] = self.done

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.done = checkpoint["done"]


def fit(
    *callbacks: Callback, model: LightningModule | None = None, ckpt_path: str | None = None, **kwargs: Any
) -> Witness:
    """Eight steps, with callbacks and then a witness."""
    witness = Witness(kwargs.pop("keep", None))
    defaults = {"max_steps": 8, "limit_train_batches": 64, "num_sanity_val_steps": 0}
    made = trainer(kwargs.pop("plugin", None) or two_casts(), callbacks=[*callbacks, witness], **{**defaults, **kwargs})
    made.fit(model or Regression(), ckpt_path=ckpt_path)
    return witness


def blends(*callbacks: Callback, **kwargs: Any) -> list[float]:
    """λ of each step."""
    return list(fit(*callbacks, **kwargs).blends.values())


# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.pairwise(1)
@pytest.mark.parametrize(
    "switch",
    [
        lambda: PrecisionSwitch("fqt", at=0.25, over=0.5),
        lambda: PrecisionSwitch("fqt", step=2, steps=4),
        lambda: PrecisionSwitch("fqt", at=0.25, steps=4),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_rises_step_by_step(switch: Callable[[], PrecisionSwitch], accumulate: int) -> None:
    found = blends(switch(), accumulate_grad_batches=accumulate)
    assert found == [1, 1, 0, 0.25, 0.5, 0.75, 1, 1]


def test_lambda_is_set_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each micro-batch: this goes over all layers."""
    values, original = [], LowBitPrecision.set_blend
    monkeypatch.setattr(LowBitPrecision, "set_blend", lambda self, value: (values.append(value), original(self, value)))
    fit(PrecisionSwitch("fqt", step=2, steps=4), accumulate_grad_batches=3)
    assert values == [1, 0, 0.25, 0.5, 0.75, 1], "once by the plugin, then at each step of the switch"


def test_high_precision_first_and_then_progressively() -> None:
    seen = fit(PrecisionSwitch("bf16", step=0), PrecisionSwitch("fqt", at=0.25, over=0.25))
    assert list(seen.phases.values()) == ["bf16"] * 2 + ["fqt"] * 6
    assert list(seen.blends.values()) == [1, 1, 0, 0.5, 1, 1, 1, 1]


def test_warm_up_from_the_first_step_on() -> None:
    assert blends(PrecisionSwitch("fqt", at=0, over=0.5)) == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]


@pytest.mark.parametrize("phase", ["qaf", "hp-forward"])
def test_to_another_phase(phase: str) -> None:
    seen = fit(PrecisionSwitch(phase, step=2, steps=2))
    assert list(seen.phases.values()) == ["fqt"] * 2 + [phase] * 6
    assert list(seen.blends.values()) == [1, 1, 0, 0.5, 1, 1, 1, 1]


@pytest.mark.parametrize(("over", "expected"), [(0.01, [0, 1, 1, 1]), (0.99, [0, 0.125, 0.25, 0.375])])
def test_takes_one_step_at_least_and_the_run_at_most(over: float, expected: list[float]) -> None:
    assert blends(PrecisionSwitch("fqt", at=0, over=over))[:4] == expected


def test_what_is_trained_with_is_blended() -> None:
    """At λ = 0 the loss is that of high precision, at 1 that of the phase, and in between neither."""

    class Losses(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, 0) * 0  # the weights stay

    def losses(*switches: Callback) -> Tensor:
        model = Losses()
        fit(*switches, model=model, plugin=FP4Precision(compute_dtype="fp32", exact=True), max_steps=3)
        return torch.stack(model.losses)

    hp, quantized = losses(PrecisionSwitch("bf16", step=0)), losses()
    blended = losses(PrecisionSwitch("fqt", step=0, steps=2))
    assert blended[0] == hp[0] != quantized[0]
    assert blended[1] != hp[1] != quantized[1] != blended[1]
    assert blended[2] == quantized[2] != hp[2]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_rise_from_0_to_1(schedule: str) -> None:
    values = [SCHEDULES[schedule](i / 1000) for i in range(1001)]
    assert (values[0], values[-1]) == (0, 1), "not exactly 0 and 1 at its ends"
    assert all(a <= b for a, b in zip(values, values[1:], strict=False)), "it falls"


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0, 0.25, 0.5, 0.75, 1]),
        ("cosine", [0, 0.1464466, 0.5, 0.8535534, 1]),
        ("sigmoid", [0, 0.0701037, 0.5, 0.9298963, 1]),  # (1 / (1 + e^2.5) - 1 / (1 + e^5)) / (1 - 2 / (1 + e^5))
        ("delayed", [0, 0, 0, 0.5, 1]),
    ],
)
def test_schedules_of_a_run(schedule: str, expected: list[float]) -> None:
    found = blends(PrecisionSwitch("fqt", step=1, steps=4, schedule=schedule))
    assert found == pytest.approx([1, *expected, 1, 1], abs=1e-6)


# --- several ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_the_last_one_due_holds_whatever_their_order(reverse: bool) -> None:
    switches = [
        PrecisionSwitch("fqt", step=0, steps=4),
        QAFSwitch(step=2),
        PrecisionSwitch("hp-forward", step=4, steps=8),
        PrecisionSwitch("fqt", step=6, steps=2),
    ]
    seen = fit(*(reversed(switches) if reverse else switches))
    assert list(seen.phases.values()) == ["fqt", "fqt", "qaf", "qaf", "hp-forward", "hp-forward", "fqt", "fqt"]
    assert list(seen.blends.values()) == [0, 0.25, 1, 1, 0, 0.125, 0, 0.5]


def test_of_two_at_one_step_the_last_in_the_list_holds() -> None:
    def gradual() -> PrecisionSwitch:
        return PrecisionSwitch("fqt", step=0, steps=4)

    assert blends(gradual(), QAFSwitch(step=0))[:2] == [1, 1]
    assert blends(QAFSwitch(step=0), gradual())[:2] == [0, 0.25]


def test_changes_by_hand() -> None:
    """The phase stays; λ stays once the switch has ended."""

    class ByHand(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.precision_plugin.set_phase("qaf")
            if trainer.global_step in (2, 6):
                trainer.precision_plugin.set_blend(0.875)

    seen = fit(PrecisionSwitch("fqt", step=0, steps=4), ByHand())
    assert list(seen.phases.values()) == ["fqt"] * 2 + ["qaf"] * 6
    assert list(seen.blends.values()) == [0, 0.25, 0.875, 0.75, 1, 1, 0.875, 0.875]


@pytest.mark.filterwarnings("ignore:The run is at λ")
def test_a_sudden_switch_goes_all_the_way() -> None:
    plugin = FP4Precision()
    plugin.set_blend(0.5)
    assert blends(PrecisionSwitch("fqt", step=4), plugin=plugin) == [0.5] * 4 + [1] * 4


# --- plateaus ---------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("said", "plateau", "begin"),
    [
        ([3, 2, 1, 1, 1, 1], {"patience": 2}, 5),
        ([3, 2, 2, 1, 1, 1], {"patience": 2}, 6),
        ([1, 2, 1, 3, 0.5, 1], {"patience": 3}, 4),
        ([3, 2.5, 2, 1.5, 1, 0.5], {"patience": 2, "min_delta": 0.5}, None),  # each is compared to the best one
        ([3, 2.5, 2, 1.5, 1, 0.5], {"patience": 1, "min_delta": 0.5}, 2),
        ([3, 2.5, 2, 1.5, 1, 0.5], {"patience": 1, "min_delta": 0.25}, None),
        ([1, 2, 3, 4, 4, 4], {"patience": 1, "mode": "max"}, 5),
        ([1, 2, 3, 4, 5, 6], {"patience": 6, "mode": "max"}, None),
        ([NAN, NAN, 1, 2, 3, 4], {"patience": 3}, 6),
        ([1, NAN, NAN, 0, 0, 0], {"patience": 2}, 3),
        ([1, -INF, -INF, 0, 0, 0], {"patience": 2}, 3),
        ([INF, INF, 1, 2, 3, 4], {"patience": 2, "mode": "max"}, 2),
    ],
)
def test_begins_after_a_plateau(said: Sequence[float], plateau: dict[str, Any], begin: int | None) -> None:
    switch = PrecisionSwitch("fqt", plateau=plateau, steps=2)
    found = blends(switch, model=Validated(*said), max_steps=7, val_check_interval=1, limit_val_batches=1)
    expected = [1.0] * 7
    if begin is not None:
        expected[begin : begin + 2] = [0, 0.5]
        del expected[7:]
    assert found == expected


def test_happens_once() -> None:
    found = blends(
        PrecisionSwitch("fqt", plateau={"patience": 1}, steps=2),
        model=Validated(1),
        max_steps=12,
        val_check_interval=1,
        limit_val_batches=1,
    )
    assert found == [1, 1, 0, 0.5] + [1] * 8


def test_a_sudden_switch_at_a_plateau() -> None:
    seen = fit(
        PrecisionSwitch("hp-forward", plateau=Plateau("other", patience=2)),
        model=Validated(1, name="other"),
        val_check_interval=1,
        limit_val_batches=1,
    )
    assert list(seen.phases.values()) == ["fqt"] * 3 + ["hp-forward"] * 5


def test_a_validation_in_mid_step_counts_for_the_next_one() -> None:
    """Steps of two micro-batches, a validation after each third: after steps 1½, 3, 4½ and 6."""
    kwargs = {"accumulate_grad_batches": 2, "val_check_interval": 3, "limit_val_batches": 1}
    for patience, begin in [(1, 3), (2, 5), (3, 6)]:
        switch = PrecisionSwitch("fqt", plateau={"patience": patience}, steps=2)
        found = blends(switch, model=Validated(1), **kwargs)
        assert found.index(0) == begin, f"after {patience} validations without an improvement"


def seen(switch: PrecisionSwitch) -> dict[str, Any]:
    """What a checkpoint holds of a switch."""
    checkpoint: dict[str, Any] = {}
    switch.on_save_checkpoint(Trainer(logger=False), BoringModel(), checkpoint)
    (state,) = checkpoint["lightning_lowbit_switches"].values()
    return dict(state)


def test_validations_outside_training_do_not_count() -> None:
    model, switch = Validated(1), PrecisionSwitch("qaf", plateau={"patience": 9})
    kwargs = {"max_steps": 8, "limit_train_batches": 64, "val_check_interval": 2, "limit_val_batches": 1}
    made = trainer(FP4Precision(), callbacks=[switch], num_sanity_val_steps=1, **kwargs)
    made.fit(model)
    assert seen(switch) == {"due": INF, "best": 1.0, "stalled": 3}, "the sanity check counts"
    made.validate(model, verbose=False)
    made.validate(Validated(1, name="other"), verbose=False)
    assert seen(switch)["stalled"] == 3


def test_another_run_begins_anew() -> None:
    switch = PrecisionSwitch("qaf", plateau={"patience": 1})
    kwargs = {"val_check_interval": 1, "limit_val_batches": 1, "max_steps": 5}
    for said, expected in [((1,), ["fqt"] * 2 + ["qaf"] * 3), ((5, 4, 3, 3), ["fqt"] * 4 + ["qaf"])]:
        assert list(fit(switch, model=Validated(*said), **kwargs).phases.values()) == expected


def test_the_same_trainer_goes_on() -> None:
    model, witness = Validated(3, 2, 2), Witness()
    switch = PrecisionSwitch("fqt", plateau={"patience": 2}, steps=4)
    kwargs = {"max_steps": -1, "limit_train_batches": 2, "limit_val_batches": 1, "val_check_interval": 1}
    made = trainer(FP4Precision(), callbacks=[switch, witness], num_sanity_val_steps=0, max_epochs=1, **kwargs)
    for epochs in range(1, 5):  # the fourth validation is in the second epoch
        made.fit_loop.max_epochs = epochs
        made.fit(model)
    assert list(witness.blends.values()) == [1, 1, 1, 1, 0, 0.25, 0.5, 0.75]


def test_a_metric_that_is_not_there() -> None:
    switch = PrecisionSwitch("qaf", plateau={"monitor": "val_los"})
    message = "plateau of 'val_los' finds no such metric after a validation, but 'val_loss'. Log it in validation_step"
    with pytest.raises(MisconfigurationException, match=message):
        fit(switch, model=Validated(1), val_check_interval=1, limit_val_batches=1)


def test_a_run_without_validation() -> None:
    with pytest.raises(MisconfigurationException, match="waits for validations, and this run has none"):
        fit(PrecisionSwitch("qaf", plateau={}), model=Validated(1))


class Ranks(Validated):
    """The loss falls on rank 0 and stays on rank 1; it is not the mean of both."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", 1.0 if self.global_rank else 1 / (1 + self.global_step), sync_dist=False)

    def on_train_end(self) -> None:
        torch.save([self.trainer.callbacks[-1].blends, flat(self)], f"{self.global_rank}.pt")


@pytest.mark.filterwarnings("ignore:It is recommended to use .self.log")
def test_all_ranks_begin_where_one_sees_a_plateau() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("a process that has used CUDA cannot fork")
    kwargs = {"devices": 2, "strategy": "ddp_fork", "use_distributed_sampler": False, "max_steps": 6}
    switch = PrecisionSwitch("fqt", plateau={"patience": 2}, steps=2)
    fit(switch, model=Ranks(), val_check_interval=1, limit_val_batches=1, **kwargs)
    (blends, weights), (others, other_weights) = (torch.load(f"{rank}.pt") for rank in range(2))
    assert list(blends.values()) == list(others.values()) == [1, 1, 1, 0, 0.5, 1]
    assert torch.equal(weights, other_weights), "the ranks have trained different weights"


# --- resume -----------------------------------------------------------------------------------------------------------

# The loader begins again, and nothing depends on it: a batch follows from its place in the run.
resumes = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


def assert_resumes(make: Callable[[], list[Callback]], at: Sequence[int], keep: str, **kwargs: Any) -> None:
    """From the checkpoint after each of these steps a run goes on as the uninterrupted one does."""

    def run(keep: str | None = None, ckpt_path: str | None = None) -> tuple[Witness, Tensor, LowBitPrecision]:
        model, plugin = Validated(3, 2, 2), FP4Precision()
        witness = fit(*make(), model=model, plugin=plugin, keep=keep, ckpt_path=ckpt_path, **kwargs)
        return witness, flat(model), plugin

    whole, weights, plugin = run(keep)
    for step in at:
        saved = torch.load(f"{step}.ckpt", weights_only=True)["lightning_lowbit"]
        assert saved["blend"].item() == whole.blends[step - 1]
        resumed, resumed_weights, resumed_plugin = run(ckpt_path=f"{step}.ckpt")
        assert list(resumed.blends) == list(whole.blends)[step:], f"resumed after step {step}: other steps"
        for name in ("blends", "phases"):
            found, expected = getattr(resumed, name), getattr(whole, name)
            assert found == {k: expected[k] for k in found}, f"resumed after step {step}: other {name}"
        assert torch.equal(resumed_weights, weights), f"resumed after step {step}: other weights"
        assert state(resumed_plugin) == state(plugin)


@resumes
def test_a_resumed_run_goes_on_with_the_switch() -> None:
    """Before its begin, at it, in the middle, before its end, at it and after it."""

    def make() -> list[Callback]:
        return [PrecisionSwitch("bf16", step=0), PrecisionSwitch("fqt", step=2, steps=3, schedule="cosine")]

    assert_resumes(make, [1, 2, 3, 4, 5, 6], "trained", accumulate_grad_batches=2)


@resumes
@pytest.mark.parametrize(("keep", "at"), [("trained", [3, 7, 9, 11]), ("validated", [2, 6, 8, 10])])
def test_a_resumed_run_remembers_the_plateau(keep: str, at: Sequence[int]) -> None:
    """Validations after steps 2, 4, …: the third is the first without an improvement, the fourth the last that counts.

    (Of a checkpoint between a step and the validation that follows it, Lightning leaves this validation out.)
    """

    def make() -> list[Callback]:
        return [PrecisionSwitch("qaf", plateau={"patience": 2}, over=0.25)]

    assert_resumes(make, at, keep, val_check_interval=2, limit_val_batches=1, max_steps=12)
    saved = (torch.load(f"{step}.ckpt", weights_only=True)["lightning_lowbit_switches"] for step in at[1:3])
    (before,), (after,) = (states.values() for states in saved)
    assert before == {"due": INF, "best": 2.0, "stalled": 1}
    record = after.pop("record", {})  # there in the checkpoint of a later step only
    is_set = after.pop("set", 8)  # likewise
    assert after == {"due": 8, "best": 2.0, "stalled": 2}
    assert record.get("step", 8) == is_set == 8


@resumes
@pytest.mark.filterwarnings("ignore:The run is at λ")
def test_without_its_state_a_plateau_is_another() -> None:
    """The former test would see it."""
    kwargs = {"val_check_interval": 1, "limit_val_batches": 1}
    plateau = {"patience": 2}
    whole = fit(PrecisionSwitch("qaf", plateau=plateau, steps=2), model=Validated(1), keep="validated", **kwargs)
    assert list(whole.blends.values()) == [1, 1, 1, 0, 0.5, 1, 1, 1]
    checkpoint = torch.load("4.ckpt", weights_only=True)
    checkpoint["lightning_lowbit_switches"].clear()
    torch.save(checkpoint, "damaged.ckpt")
    resumed = fit(
        PrecisionSwitch("qaf", plateau=plateau, steps=2), model=Validated(1), ckpt_path="damaged.ckpt", **kwargs
    )
    assert list(resumed.blends.values()) == [0, 0, 0, 0], "it goes on from somewhere else"


# --- logging, compilation, arguments ----------------------------------------------------------------------------------


def logged(name: str, *callbacks: Callback, **kwargs: Any) -> list[tuple[int, float]]:
    """The metric, with the step of each row."""
    logger = CSVLogger("logs")
    fit(*callbacks, logger=logger, **kwargs)
    with open(logger.experiment.metrics_file_path, newline="") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]


def test_lambda_is_logged_as_often_as_the_logger_takes_it() -> None:
    """Steps of a row are those that the logger takes, here the third of each three; the begin of an epoch forgets."""

    class Asked(Regression):
        def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            asked.append(self.trainer.global_step)
            assert value.device.type == "cpu", "the host would wait for a device"
            super().log(name, value, *args, **kwargs)

    asked: list[int] = []
    kwargs = {"max_steps": 16, "limit_train_batches": 24, "accumulate_grad_batches": 2, "log_every_n_steps": 3}
    found = logged("blend", PrecisionSwitch("fqt", step=1, steps=8), model=Asked(), **kwargs)
    assert asked == [2, 5, 8, 9], "where the logger takes it, and at the end"
    assert found == [(2, 0.125), (5, 0.5), (8, 0.875), (11, 1.0)], "the next epoch begins at step 12"


def test_each_lambda_is_logged() -> None:
    found = logged("blend", PrecisionSwitch("fqt", step=1, steps=2), log_every_n_steps=1, limit_train_batches=4)
    assert found == [(1, 0.0), (2, 0.5), (3, 1.0)]


def test_a_sudden_switch_ends_the_log_of_another() -> None:
    switches = [PrecisionSwitch("fqt", step=0, steps=4), QAFSwitch(step=2)]
    found = logged("blend", *switches, log_every_n_steps=1, limit_train_batches=4)
    assert found == [(0, 0.0), (1, 0.25), (2, 1.0), (3, 1.0)]  # Lightning repeats a value until the epoch ends


def test_without_progressive_quantization_no_lambda_is_logged() -> None:
    assert logged("blend", QAFSwitch(step=2), log_every_n_steps=1) == []


def test_the_phase_is_logged_at_the_begin() -> None:
    assert logged("phase", PrecisionSwitch("qaf", step=2, steps=4), log_every_n_steps=1) == [(2, 1.0)]


@pytest.mark.slow
def test_no_recompilation_while_lambda_changes() -> None:
    from torch._dynamo.utils import counters

    class Compiled(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2))
            self.compiled: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.compiled = self.compiled or torch.compile(self.layer, backend="eager")
            return self.compiled(x)

    counters.clear()
    torch._dynamo.reset()
    found = blends(PrecisionSwitch("fqt", step=1, steps=5), model=Compiled())
    assert found == pytest.approx([1, 0, 0.2, 0.4, 0.6, 0.8, 1, 1])
    assert counters["stats"]["unique_graphs"] == 2, "one graph for all λ below 1, and one for all the way"
    assert not counters["graph_break"], dict(counters["graph_break"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"at": 0.5, "over": 0.1, "steps": 5}, r"Give over .* or steps .*, not both; got over=0.1, steps=5"),
        ({"at": 0.5, "over": 0}, "over is a fraction of all optimizer steps, above 0 and below 1, or None; got 0"),
        ({"at": 0, "over": 1}, "above 0 and below 1, or None; got 1"),
        ({"at": 0, "over": "0.5"}, "above 0 and below 1, or None; got '0.5'"),
        ({"at": 0, "over": math.nan}, "above 0 and below 1, or None; got nan"),
        ({"at": 0.95, "over": 0.1}, r"would end half quantized: at \+ over is less than 1; got at=0.95, over=0.1"),
        ({"at": 0.5, "over": 0.5}, r"at \+ over is less than 1; got at=0.5, over=0.5"),
        ({"at": True}, "at is a fraction of all optimizer steps, 0 or more and at most 1; got True"),
        ({"step": 1.5}, "step is a number of optimizer steps, 0 or more; got 1.5"),
        ({"at": 0.5, "steps": 2.5}, "steps is a number of optimizer steps, 1 or more, or None; got 2.5"),
        ({"plateau": "val_loss"}, "plateau is a Plateau or a mapping such as .*; got 'val_loss'"),
        ({"plateau": {"patience": 2.5}}, "patience is a number of validations, 1 or more; got 2.5"),
        ({"at": 0.5, "steps": 0}, "steps is a number of optimizer steps, 1 or more, or None; got 0"),
        ({"at": 0.5, "over": 0.1, "schedule": "cosin"}, r"Unknown schedule 'cosin'. Did you mean 'cosine'\?"),
        ({"at": 0.5, "schedule": "cosine"}, "A sudden switch has no schedule: give over or steps"),
        ({"to": "bf16", "at": 0.5, "over": 0.1}, "nothing to quantize progressively: leave out over and steps"),
        ({"to": "bf16", "at": 0.5, "steps": 5}, "nothing to quantize progressively: leave out over and steps"),
        ({"at": 0.5, "plateau": {}}, r"Give either at .* or below \(.*; got at=0.5, plateau={}\."),
        ({"step": 5, "plateau": Plateau()}, r"Give either .*; got step=5, plateau=Plateau\("),
        ({"plateau": {"moniter": "x"}}, r"Unknown field of a plateau 'moniter'. Did you mean 'monitor'\?"),
        ({"plateau": {"patience": 0}}, "patience is a number of validations, 1 or more; got 0"),
        ({"plateau": {"min_delta": -1}}, "min_delta is what an improvement exceeds, 0 or more; got -1"),
        ({"plateau": {"mode": "least"}}, "Unknown mode of a plateau 'least'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionSwitch(**{"to": "fqt", **arguments})


def test_a_run_that_ends_in_the_middle_says_so() -> None:
    with pytest.warns(UserWarning, match=r"Training ended at λ = 0.4: .* Shorten the gradual switch, or train for lon"):
        fit(PrecisionSwitch("fqt", step=4, steps=5), max_steps=7)


@resumes
def test_a_resumed_run_without_its_switch_says_so() -> None:
    fit(PrecisionSwitch("fqt", step=4, steps=5), max_steps=7, keep="trained")
    with pytest.warns(
        UserWarning, match=r"is at λ = 0.4, .* none of its callbacks goes on with: .* plugin.set_blend\(1.0\)"
    ):
        resumed = fit(PrecisionSwitch("fqt", step=100), ckpt_path="7.ckpt")
    assert list(resumed.blends.values()) == pytest.approx([0.4])


def test_a_share_of_an_endless_run() -> None:
    switch = PrecisionSwitch("fqt", step=2, over=0.1)
    message = r"PrecisionSwitch\(over=0.1\) is a fraction of all steps, .* or give steps instead of over"
    with pytest.raises(MisconfigurationException, match=message):
        fit(switch, max_steps=-1, max_epochs=-1)


@pytest.mark.parametrize("plateau", [None, {"patience": 1}])
def test_a_switch_may_be_given_twice(plateau: dict[str, int] | None) -> None:
    """By a recipe, and by an overlay on top of it."""
    when: dict[str, Any] = {"at": 0.0} if plateau is None else {"plateau": plateau}
    runs = []
    for times in (1, 2):
        switches = [PrecisionSwitch("fqt", steps=3, **when) for _ in range(times)]
        runs.append(blends(*switches, model=Validated(1), val_check_interval=2, limit_val_batches=1))
    assert runs[0] == runs[1] and 0 in runs[0]


def test_switches_of_one_kind_have_states_of_their_own() -> None:
    changes = [
        {},
        {"to": "qaf"},
        {"plateau": {"patience": 3}},
        {"plateau": {"monitor": "other"}},
    ]
    keys = {PrecisionSwitch(**{"to": "fqt", "plateau": {}, "steps": 4, **change}).state_key for change in changes}
    assert len(keys) == len(changes)


def test_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    config = yaml.safe_load("""
        seed_everything: 1
        trainer:
          accelerator: cpu
          logger: false
          enable_checkpointing: false
          plugins: {class_path: lightning_lowbit.TernaryPrecision}
          callbacks:
            - class_path: lightning_lowbit.PrecisionSwitch
              init_args: {to: bf16, step: 0}
            - class_path: lightning_lowbit.PrecisionSwitch
              init_args: {to: fqt, plateau: {monitor: loss, patience: 3}, over: 0.1, schedule: cosine}
    """)
    cli = LightningCLI(BoringModel, args=config, run=False, save_config_callback=None, auto_configure_optimizers=False)
    sudden, gradual = (switch for switch in cli.trainer.callbacks if isinstance(switch, PrecisionSwitch))
    assert (sudden.step, sudden.is_gradual) == (0, False)
    assert gradual.plateau == Plateau("loss", 3, 0.0, "min")
    assert (gradual.over, gradual.steps, gradual.schedule) == (0.1, None, "cosine")
