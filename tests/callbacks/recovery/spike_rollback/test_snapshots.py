"""Where a rollback ends: the run without the bad batches; which snapshot is taken."""

from itertools import pairwise, product

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lightning_lowbit import ConservativeGradScaler, FP8Precision, LowBitPrecision, PrecisionSwitch
from tests.callbacks.recovery.spike_rollback.runs import (
    BAD,
    KEPT,
    OPTIMIZERS,
    RESTORED,
    Scripted,
    assert_same,
    assert_undone,
    fit,
    rollback,
    rolled_back,
    steps,
    trainer,
)
from tests.lightning_imports import MixedPrecision
from tests.precision.regression_model import On
from tests.tables import each


@each("optimizer, kind, device", product(OPTIMIZERS, ["spike", "nan"], ["same", "cpu"]), fast=3)
def test_ends_as_the_run_that_never_saw_the_batches(optimizer, kind, device):
    callback, model = rollback(device=device), Scripted(range(20), {BAD: kind}, optimizer)
    assert_undone(rolled_back(callback, model=model))
    assert steps(callback) == [(13, 11, 8)]


@each("optimizer", OPTIMIZERS, fast=2)
def test_without_a_spike_nothing_changes(optimizer):
    callback = rollback(lr_factor=0.5)
    found = fit(Scripted(range(20), optimizer=optimizer), callback)
    assert steps(callback) == []
    assert_same(found.end, fit(Scripted(range(20), optimizer=optimizer)).end, "watching changed the run")


def test_objects_stay():
    addresses = []

    def note(run, module, *_):
        state = [value for kept in module.made.state.values() for value in kept.values()]
        addresses.append([value.data_ptr() for value in (*module.parameters(), *state)])

    rolled_back(rollback(), On(on_train_batch_end=note), model=Scripted(range(20), {BAD: "spike"}, "AdamW"))
    assert len(addresses) == 20 and all(a == b for a, b in pairwise(addresses)), "a tensor was replaced"


@each("optimizer, settings, bad, rollbacks, kept", [
    # To the very beginning, before which an optimizer has no state.
    ("AdamW", {}, {1: "nan"}, [(3, 1, 0)], range(3, 20)),
    # The update of step 8 is bad and its loss is not; the snapshot of step 9 holds it, of which the loss of 9 tells.
    ("SGD", {"every_n_steps": 3}, {8: "late"}, [(11, 9, 6)], [*range(6), *range(11, 20)]),
    # The snapshot of step 12 holds the update of step 11; after the rollback losses are good again, until step 15.
    ("SGD", {}, {11: "spike", 15: "spike"}, [(13, 11, 8), (17, 15, 8)], [*range(8), *range(17, 20)]),
    # The last steps are judged, too.
    ("SGD", {}, {18: "spike"}, [(20, 18, 16)], range(16)),
    ("SGD", {}, {19: "spike"}, [(20, 19, 16)], range(16)),
], fast=2)  # fmt: skip
def test_nothing_of_a_bad_update_is_left(optimizer, settings, bad, rollbacks, kept):
    callback = rollback(**settings)
    assert_undone(rolled_back(callback, model=Scripted(range(20), bad, optimizer)), kept)
    assert steps(callback) == rollbacks


@each("good_for, to", [(3, 8), (0, 8), (4, 0), (2, 8), (7, 0)], fast=2)
def test_a_snapshot_proves_good(good_for, to):
    """Of the snapshot of step 8, where the losses of 8, 9 and 10 are good and that of 11 is not. That of 0 precedes."""
    rolled_back(callback := rollback(good_for=good_for, every_n_steps=8))
    assert steps(callback) == [(13, 11, to)]


def scaled():
    return ConservativeGradScaler(init_scale=2.0**4, growth_interval=3, cooldown=1, device="cpu")


PLUGINS = {
    "fp8, delayed": lambda: FP8Precision("delayed", compute_dtype="fp32"),
    "fp16": lambda: LowBitPrecision("bf16", compute_dtype="fp16", scaler=scaled()),
    "fp16, fp8, delayed": lambda: FP8Precision("delayed", compute_dtype="fp16", scaler=scaled()),
    "Lightning's": lambda: MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**4, growth_interval=3)),
}


@pytest.mark.filterwarnings("ignore:SpikeRollback")
@pytest.mark.fast("fp16, fp8, delayed")
@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_the_scaler_and_the_amaxes_go_back_and_counters_go_on(plugin):
    """Random bits differ, of which these casts have none: they round to nearest."""
    ends = []
    for numbers in (range(20), KEPT):
        used, model = plugin(), Scripted(numbers, {BAD: "spike"}, "AdamW")
        run = trainer(*([rollback()] if numbers != KEPT else []), plugin=used)
        run.fit(model)
        assert run.global_step == len(numbers)
        assert getattr(used, "step", run.global_step) == run.global_step, "the plugin's step went back"
        histories = used.histories.state_dict() if isinstance(used, LowBitPrecision) else {}
        ends.append((model.end, None if used.scaler is None else used.scaler.state_dict(), histories))
    assert_same(*ends, "not the run without these batches")


def test_what_an_optimizer_keeps_in_its_groups_goes_back_and_what_is_scheduled_stays():
    def count(run, module, *_):
        group = module.made.param_groups[0]
        group["k"] = group.get("k", 0) + 1
        if run.global_step == 10:  # after the snapshot
            group["weight_decay"] = 0.5

    (group,) = rolled_back(rollback(), On(on_train_batch_end=count)).made.param_groups
    assert group["k"] == 15, "20 steps, of which five were undone"
    assert group["weight_decay"] == 0.5


class Grows(Scripted):
    """A layer with buffers joins after so many steps."""

    def __init__(self, numbers, bad=None, *, joins):
        super().__init__(numbers, bad, "AdamW")
        self.joins, self.again = joins, None

    def on_train_batch_start(self, batch, batch_idx):
        step = self.trainer.global_step
        if step == self.joins:
            self.body.append(nn.BatchNorm1d(1))
            self.made.add_param_group({"params": [*self.body[-1].parameters()]})
        if step == 13:
            self.again = {name: value.clone() for name, value in self.state_dict().items()}


@each("joins", [6, 9, BAD], fast=2)
def test_a_layer_that_joins_goes_back_too(joins):
    """To the snapshot of step 8 or, where it has joined since, to how it joined."""
    model = rolled_back(callback := rollback(), model=Grows(range(20), {BAD: "nan"}, joins=joins), says=RESTORED)
    assert steps(callback)[0][2] == 8
    assert all(value.isfinite().all() for value in model.state_dict().values())
    if joins < 8:
        assert_same(model.end, fit(Grows(KEPT, joins=joins)).end, "not the run without these batches")
    else:
        assert model.again["body.4.weight"] == 1 and model.again["body.4.bias"] == 0, "not as it joined"


def test_a_buffer_of_another_shape_is_named_and_left():
    class Cached(Scripted):
        def __init__(self, *args):
            super().__init__(*args)
            self.register_buffer("cache", torch.zeros(4), persistent=False)

        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == 10:
                self.cache = torch.ones(8)
                self.register_buffer("another", torch.ones(2), persistent=False)

    says = "Not restored: buffer cache, buffer another, which step 8 did not have so"
    model = rolled_back(rollback(), model=Cached(range(20), {BAD: "nan"}), says=says)
    assert torch.equal(model.cache, torch.ones(8)) and torch.equal(model.another, torch.ones(2))
    assert_undone(model)


def test_statistics_of_rules_go_back_to_just_after_a_reset_of_moments():
    """The reset, before the snapshot of step 8, empties the state of the wrapped optimizer."""
    reset = PrecisionSwitch("qaf", step=8, moments="reset")
    model = Scripted(range(20), {BAD: "nan"}, "Adaptive")
    rolled_back(reset, rollback(), model=model, plugin=FP8Precision())
    assert {int(state["steps"]) for state in model.made.state.values()} == {len(KEPT)}
