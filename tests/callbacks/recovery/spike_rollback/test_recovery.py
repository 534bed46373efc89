"""Casts and learning rates for some steps after a rollback; checkpoints amid them."""

import pytest
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from lightning_lowbit import FP8Precision, PrecisionSwitch
from lightning_lowbit.callbacks.recovery.spike_rollback import StepLosses
from tests.callbacks.recovery.spike_rollback.runs import (
    BAD,
    Scripted,
    assert_same,
    assert_undone,
    fit,
    rollback,
    rolled_back,
    steps,
    trainer,
)
from tests.precision.regression_model import On
from tests.tables import each

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


def saves(at):
    """A callback that saves a checkpoint after so many steps."""
    return On(on_train_batch_end=lambda run, *_: run.global_step == at and run.save_checkpoint("saved.ckpt"))


def resumed(*callbacks, bad=None, **kwargs):
    return fit(Scripted(range(20), bad), *callbacks, ckpt_path="saved.ckpt", **kwargs)


@each("schedule", [lambda made: ExponentialLR(made, 0.9), lambda made: LambdaLR(made, lambda step: 0.9**step)], fast=1)
def test_learning_rates_are_lower_for_some_steps(schedule):
    model = Scripted(range(20), {BAD: "nan"}, scheduler=schedule)
    rolled_back(rollback(lr_factor=0.25, recovery_steps=3), model=model)
    factors = [rate / (1e-2 * 0.9**step) for step, rate in enumerate(model.made.rates)]
    assert factors == pytest.approx([1.0] * 13 + [0.25] * 3 + [1.0] * 4)
    assert model.made.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**20), "the schedule saw the factor"


def test_a_phase_for_some_steps_or_until_the_run_ends():
    model = rolled_back(rollback(phase="bf16", recovery_steps=3), plugin=FP8Precision())
    assert model.phases == ["fqt"] * 13 + ["bf16"] * 3 + ["fqt"] * 4
    model = rolled_back(rollback(phase="bf16", lr_factor=0.5), plugin=(plugin := FP8Precision()))
    assert (model.phases[-1], plugin.phase) == ("bf16", "fqt")
    assert not model.made._optimizer_step_pre_hooks, "the optimizer was not let go of"


@each("to, at, goes_on", [("qaf", 16, False), ("bf16", 15, True), ("bf16", 16, True)], fast=1)
def test_a_switch_that_acts_meanwhile_has_the_last_word(to, at, goes_on):
    """Also one to the phase of the recovery; a resumed run remembers it, with or without the switch."""

    def callbacks(switches=True):
        switch = [PrecisionSwitch(to, step=15)] * switches
        return [rollback(phase="bf16", recovery_steps=4), *switch]

    whole = ["fqt"] * 13 + ["bf16"] * 2 + [to] * 5
    assert rolled_back(*callbacks(), saves(at), plugin=FP8Precision()).phases == whole
    assert resumed(*callbacks(goes_on), plugin=FP8Precision()).phases == whole[at:], "it forgot the switch"


@pytest.mark.fast("True")
@pytest.mark.parametrize("first", [True, False])
def test_a_switch_from_before_leaves_a_resumed_recovery_alone(first):
    def callbacks():
        both = [rollback(phase="bf16", recovery_steps=4), PrecisionSwitch("qaf", step=3, steps=13)]
        return both if first else both[::-1]

    blends = []
    note = On(on_train_batch_end=lambda run, *_: blends.append(float(run.precision_plugin.blend)))
    whole = ["fqt"] * 3 + ["qaf"] * 10 + ["bf16"] * 4 + ["qaf"] * 3
    assert rolled_back(*callbacks(), saves(14), note, plugin=FP8Precision()).phases == whole
    assert resumed(*callbacks(), note, plugin=FP8Precision()).phases == whole[14:]
    assert len(blends) == 26 and blends[20:] == blends[14:20], "λ did not go on"


@pytest.mark.slow
def test_a_longer_run_goes_on_with_the_recovery():
    settings = {"phase": "bf16", "recovery_steps": 6}
    run = trainer(rollback(**settings), plugin=FP8Precision(), max_steps=16)
    with pytest.warns(UserWarning, match="SpikeRollback"):
        run.fit(Scripted(range(20), {BAD: "nan"}))
    assert run.precision_plugin.phase == "fqt"
    run.save_checkpoint("saved.ckpt")
    model = resumed(rollback(**settings), plugin=FP8Precision(), max_epochs=2, max_steps=20)
    assert model.phases == ["bf16"] * 3 + ["fqt"]


def test_phase_and_learning_rates_are_their_own_after_a_step_that_broke_off():
    class Breaks(Scripted):
        def on_after_backward(self):
            if self.trainer.global_step == 14:
                raise KeyError("broken")

    model = Breaks(range(20), {BAD: "nan"})
    with pytest.warns(UserWarning, match="SpikeRollback"), pytest.raises(KeyError, match="broken"):
        fit(model, rollback(lr_factor=0.5, phase="bf16"), plugin=(plugin := FP8Precision()))
    assert (model.phases[-1], plugin.phase) == ("bf16", "fqt")
    assert model.made.param_groups[0]["lr"] == 1e-2
    assert not model.made._optimizer_step_pre_hooks


@pytest.mark.fast("15")
@pytest.mark.parametrize("at", [13, 15, 16, 18])
def test_a_recovery_goes_on_in_a_resumed_run(at):
    callback, again = (rollback(phase="bf16", lr_factor=0.5, recovery_steps=4) for _ in range(2))
    whole = rolled_back(callback, saves(at), plugin=FP8Precision())
    if at == 13:  # saved before the loss of step 11 was read
        with pytest.raises(RuntimeError, match="saved after it, at step 13: resume from an earlier one"):
            resumed(again, plugin=FP8Precision())
        return
    model = resumed(again, plugin=FP8Precision())
    assert model.phases == whole.phases[at:], "another phase"
    assert model.made.rates == whole.made.rates[at:], "another learning rate"
    assert_same(model.end, whole.end, "not the uninterrupted run")
    assert steps(again) == steps(callback)
    assert repr(again.state_dict()) == repr(callback.state_dict()), "NaNs are equal in words alone"


def test_a_resumed_run_goes_back_to_where_it_was_resumed():
    fit(Scripted(range(20)), rollback(), saves(9))
    with pytest.warns(UserWarning, match="The loss of step 11 .* weights of step 9"):
        model = resumed(rollback(every_n_steps=50), bad={BAD: "spike"})
    assert_undone(model, [*range(9), *range(13, 20)])


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_state_of_an_earlier_version_loads(is_ours):
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
    assert callback.state_dict() == {**state, "good": [1.0, 2.0], "start": 1.5}


def test_the_mean_of_micro_batches_is_saved_as_it_is():
    losses = StepLosses()
    losses.load([(4, 1 / 3)])
    assert losses.state() == [(4, 1 / 3)]
