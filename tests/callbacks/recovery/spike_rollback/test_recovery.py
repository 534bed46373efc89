"""Casts and learning rates for some steps after a rollback; checkpoints amid them."""

import pytest
import torch

from lightning_lowbit import FP8Precision, PrecisionSwitch
from tests.callbacks.recovery.spike_rollback.runs import BAD, Scripted, assert_same, fit, rollback, steps, trainer
from tests.lightning_imports import Callback

RESUMING = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


@pytest.mark.parametrize("make", ["ExponentialLR", "LambdaLR"])
def test_learning_rates_are_lower_for_some_steps(make):
    def scheduler(optimizer):
        if make == "ExponentialLR":
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(Scripted(range(20), {BAD: "nan"}, scheduler=scheduler), rollback(lr_factor=0.25, recovery_steps=3))
    factors = [rate / (1e-2 * 0.9**step) for step, rate in enumerate(model.made.rates)]
    assert factors == pytest.approx([1.0] * 13 + [0.25] * 3 + [1.0] * 4)
    assert model.made.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**20), "the schedule saw the factor"


def test_a_phase_for_some_steps():
    plugin = FP8Precision()
    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(Scripted(range(20), {BAD: "nan"}), rollback(phase="bf16", recovery_steps=3), plugin=plugin)
    assert model.phases == ["fqt"] * 13 + ["bf16"] * 3 + ["fqt"] * 4


def test_a_run_that_ends_meanwhile_ends_in_its_own_phase():
    plugin = FP8Precision()
    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(Scripted(range(16), {BAD: "nan"}), rollback(phase="bf16", lr_factor=0.5), plugin=plugin)
    assert model.phases[-1] == "bf16"
    assert plugin.phase == "fqt"
    assert not model.made._optimizer_step_pre_hooks, "the optimizer was not let go of"


@RESUMING
def test_a_switch_that_acts_meanwhile_has_the_last_word():
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
def test_a_switch_to_the_phase_of_the_recovery_meanwhile_stays():
    def callbacks():
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
def test_a_switch_from_before_leaves_a_resumed_recovery_alone(first):
    """Whatever the order of the callbacks."""

    def callbacks():
        both = [rollback(phase="bf16", recovery_steps=4), PrecisionSwitch("qaf", step=3, steps=13)]
        return both if first else both[::-1]

    class Blends(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, run, *_):
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
def test_a_longer_run_goes_on_with_the_recovery():
    """Saved at the end, in the phase of before."""
    run = trainer(rollback(phase="bf16", recovery_steps=6), plugin=FP8Precision(), max_steps=16)
    with pytest.warns(UserWarning, match="SpikeRollback"):
        run.fit(Scripted(range(24), {BAD: "nan"}))
    assert run.precision_plugin.phase == "fqt"
    run.save_checkpoint("saved.ckpt")
    settings = {"phase": "bf16", "recovery_steps": 6}
    model = resumed(Scripted(range(60)), rollback(**settings), plugin=FP8Precision(), max_epochs=2, max_steps=22)
    assert model.phases == ["bf16"] * 3 + ["fqt"] * 3


def test_learning_rates_are_its_own_after_a_step_that_broke_off():
    class Breaks(Scripted):
        def on_after_backward(self):
            if self.trainer.global_step == 14:
                raise KeyError("broken")

    model = Breaks(range(20), {BAD: "nan"})
    with pytest.warns(UserWarning, match="SpikeRollback"), pytest.raises(KeyError, match="broken"):
        fit(model, rollback(lr_factor=0.5))
    assert model.made.param_groups[0]["lr"] == 1e-2
    assert not model.made._optimizer_step_pre_hooks


class Saves(Callback):
    """A checkpoint after a number of steps."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, run, *_):
        if run.global_step == self.at:
            run.save_checkpoint("saved.ckpt")


def resumed(model, *callbacks, **kwargs):
    trainer(*callbacks, **kwargs).fit(model, ckpt_path="saved.ckpt", weights_only=True)
    return model


@RESUMING
@pytest.mark.parametrize("at", [13, 15, 16, 18])
def test_a_recovery_goes_on_in_a_resumed_run(at):
    settings = {"phase": "bf16", "lr_factor": 0.5, "recovery_steps": 4}
    with pytest.warns(UserWarning, match="SpikeRollback"):
        whole = fit(
            Scripted(range(20), {BAD: "nan"}), callback := rollback(**settings), Saves(at), plugin=FP8Precision()
        )
    if at == 13:  # saved before the loss of step 11 was read
        with pytest.raises(RuntimeError, match="saved after it, at step 13: resume from an earlier one"):
            resumed(Scripted(range(20)), rollback(**settings), plugin=FP8Precision())
        return
    model = resumed(Scripted(range(20)), again := rollback(**settings), plugin=FP8Precision())
    assert model.phases == whole.phases[at:], "another phase"
    assert model.made.rates == whole.made.rates[at:], "another learning rate"
    assert_same(model.end, whole.end, "not the uninterrupted run")
    assert steps(again) == steps(callback)
    assert repr(again.state_dict()) == repr(callback.state_dict()), "NaNs are equal in words alone"


@RESUMING
def test_a_resumed_run_goes_back_to_where_it_was_resumed():
    fit(Scripted(range(20)), rollback(), Saves(9))
    callback = rollback(every_n_steps=50)
    with pytest.warns(UserWarning, match="The loss of step 11 .* weights of step 9"):
        model = resumed(Scripted(range(20), {BAD: "spike"}), callback)
    assert_same(model.end, fit(Scripted([*range(9), *range(13, 20)])).end, "not the run without these batches")
