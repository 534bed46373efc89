"""Gradual switches after a resume, and in logs."""

from copy import deepcopy
from math import inf

import pytest
import torch

from lightning_lowbit import PrecisionSwitch, QAFSwitch
from tests.callbacks.switches.runs import RESUMES, Validated, fit
from tests.curves import csv_curves
from tests.lightning_imports import CSVLogger
from tests.precision.regression_model import Regression, state, two_casts
from tests.tables import each

pytestmark = RESUMES


def assert_resumes(switches, at, keep, **kwargs):
    """From the checkpoint after each of these steps a run goes on as the uninterrupted one does."""

    def run(**how):
        plugin = two_casts()
        return fit(*deepcopy(switches), model=Validated(3, 2, 2), plugin=plugin, **how, **kwargs), state(plugin)

    whole, plugin = run(keep=keep)
    for step in at:
        saved = torch.load(f"{step}.ckpt", weights_only=True)["lightning_lowbit"]
        assert saved["blend"].item() == whole.blends[step - 1]
        resumed, resumed_plugin = run(ckpt_path=f"{step}.ckpt")
        assert resumed.rows == whole.rows[step:], f"resumed after step {step}"
        assert torch.equal(resumed.weights, whole.weights), f"resumed after step {step}: other weights"
        assert resumed_plugin == plugin


@each("at", [[1, 3, 5], [2, 4, 6]], fast=1)
def test_a_resumed_run_goes_on_with_the_switch(at):
    switches = [PrecisionSwitch("bf16", step=0), PrecisionSwitch("fqt", step=2, steps=3, schedule="cosine")]
    assert_resumes(switches, at, "trained", accumulate_grad_batches=2)


@each(("keep", "at"), [("validated", [2, 6, 8, 10]), ("trained", [3, 7, 9, 11])], fast=1)
def test_a_resumed_run_remembers_the_plateau(keep, at):
    """Validations after steps 2, 4, …: the third is the first without an improvement, the fourth the last that counts.

    (Of a checkpoint between a step and the validation that follows it, Lightning leaves this validation out.)
    """
    switch = PrecisionSwitch("qaf", plateau={"patience": 2}, over=0.25)
    assert_resumes([switch], at, keep, val_check_interval=2, limit_val_batches=1, max_steps=12)
    saved = (torch.load(f"{step}.ckpt", weights_only=True)["lightning_lowbit_switches"] for step in at[1:3])
    (before,), (after,) = (states.values() for states in saved)
    assert before == {"due": inf, "best": 2.0, "stalled": 1}
    record = after.pop("record", {})  # there in the checkpoint of a later step only
    is_set = after.pop("set", 8)  # likewise
    assert after == {"due": 8, "best": 2.0, "stalled": 2}
    assert record.get("step", 8) == is_set == 8


def logged(*callbacks, **kwargs):
    """λ, by the step of each row."""
    fit(*callbacks, logger=CSVLogger("logs"), model=(model := kwargs.pop("model", Regression())), **kwargs)
    return {step: row["blend"] for step, row in csv_curves(model.trainer, "blend".__eq__).items()}


def test_lambda_is_logged_as_often_as_the_logger_takes_it():
    """Steps of a row are those that the logger takes, here the third of each three; the begin of an epoch forgets."""

    class Asked(Regression):
        def log(self, name, value, *args, **kwargs):
            asked.append(self.trainer.global_step)
            assert value.device.type == "cpu", "the host would wait for a device"
            super().log(name, value, *args, **kwargs)

    asked = []
    kwargs = {"max_steps": 16, "limit_train_batches": 24, "accumulate_grad_batches": 2, "log_every_n_steps": 3}
    found = logged(PrecisionSwitch("fqt", step=1, steps=8), model=Asked(), **kwargs)
    assert asked == [2, 5, 8, 9], "where the logger takes it, and at the end"
    assert found == {2: 0.125, 5: 0.5, 8: 0.875, 11: 1.0}, "the next epoch begins at step 12"


@each("every, at", [(1, 5), (1, 7), (3, 5), (3, 6), (3, 7)])
def test_a_resumed_run_logs_lambda_as_the_uninterrupted_one(every, at):
    """Also from within and after the steps between the end of the switch, at step 5, and its log."""
    switch, kwargs = PrecisionSwitch("fqt", step=1, steps=4), {"log_every_n_steps": every, "max_steps": 12}
    whole = logged(switch, keep="trained", **kwargs)
    assert whole[max(whole)] == 1
    rest = logged(deepcopy(switch), ckpt_path=f"{at}.ckpt", **kwargs)
    assert rest == {step: blend for step, blend in whole.items() if step >= at}


def test_a_sudden_switch_ends_the_log_of_another_and_has_none_of_its_own():
    switches = [PrecisionSwitch("fqt", step=0, steps=4), QAFSwitch(step=2)]
    found = logged(*switches, log_every_n_steps=1, limit_train_batches=4)
    assert found == {0: 0.0, 1: 0.25, 2: 1.0}
    assert logged(QAFSwitch(step=2), log_every_n_steps=1) == {}


def test_a_run_that_ends_in_the_middle_says_so_and_so_does_one_that_resumes_there_without_its_switch():
    with pytest.warns(UserWarning, match=r"Training ended at λ = 0.4: .* Shorten the gradual switch, or train for lon"):
        fit(PrecisionSwitch("fqt", step=4, steps=5), max_steps=7, keep="trained")
    words = r"is at λ = 0.4, .* none of its callbacks continues: .* plugin.set_blend\(1.0\)"
    with pytest.warns(UserWarning, match=words):
        resumed = fit(PrecisionSwitch("fqt", step=100), ckpt_path="7.ckpt")
    assert resumed.blends == pytest.approx([0.4])


@pytest.mark.fast("plateau1")
@pytest.mark.parametrize("plateau", [None, {"patience": 1}])
def test_a_switch_may_be_given_twice(plateau):
    when = {"at": 0.0} if plateau is None else {"plateau": plateau}
    runs = []
    for times in (1, 2):
        switches = [PrecisionSwitch("fqt", steps=3, **when) for _ in range(times)]
        runs.append(fit(*switches, model=Validated(1), val_check_interval=2, limit_val_batches=1).blends)
    assert runs[0] == runs[1] and 0 in runs[0]
