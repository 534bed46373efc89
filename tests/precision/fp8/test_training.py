"""Training in FP8: losses, histories, and what has no part in them."""

from functools import cache

import pytest
import torch

from lightning_lowbit import FP8Precision, LowBitPrecision, QAFSwitch
from lightning_lowbit.nn import AmaxHistories, fold
from tests.lightning_imports import BoringModel
from tests.precision.base.models import GAN
from tests.precision.fp16.runs import assert_same
from tests.precision.regression_model import (
    DOWN,
    LAYERS,
    On,
    Regression,
    Witness,
    assert_histories,
    fitted,
    flat,
    state,
    trainer,
)


@pytest.mark.fast("delayed-token")
@pytest.mark.parametrize("smooth", [None, "channel", "token"])
@pytest.mark.parametrize("scaling", ["delayed", "current", "row", "blockwise", "mx"])
def test_loss_falls(scaling, smooth):
    first, last = losses(FP8Precision(scaling, smooth_swiglu=smooth, history=4 if scaling == "delayed" else 16))
    assert last < 0.4 * first, f"the loss only falls from {first:.3f} to {last:.3f}"
    _, in_bf16 = losses_in_bf16()
    assert last < 1.5 * in_bf16, f"the loss falls to {last:.3f}, in bf16 to {in_bf16:.3f}"


def losses(plugin):
    """Of validation, before training and after it."""
    model = fitted(plugin, max_steps=40, limit_train_batches=20, limit_val_batches=4).lightning_module
    return torch.stack(model.val_losses[2:6]).mean(), torch.stack(model.val_losses[-4:]).mean()


@cache
def losses_in_bf16():
    return losses(LowBitPrecision("bf16"))


def delayed(history=4, **kwargs):
    return FP8Precision(history=history, **{"smooth_swiglu": "channel", "compute_dtype": "fp32", **kwargs})


# Ways to train, each of which takes its steps elsewhere.
WAYS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3, "limit_train_batches": 12},
    "last batch alone": {"accumulate_grad_batches": 3, "limit_train_batches": 4, "max_epochs": 3},
    "validated": {"val_check_interval": 2, "limit_val_batches": 2, "num_sanity_val_steps": 2},
    "validated between micro-batches": {
        "accumulate_grad_batches": 3,
        "limit_train_batches": 12,
        "val_check_interval": 1,
        "limit_val_batches": 1,
    },
    "clipped": {"gradient_clip_val": 1e-3},
    "clipped by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("smooth", [None, "channel"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_histories_are_what_the_steps_saw(way, recompute, smooth):
    model, witness, plugin = Regression(recompute, val_size=100.0), Witness(), delayed(3, smooth_swiglu=smooth)
    options = {"max_steps": 4, "limit_train_batches": 4, "num_sanity_val_steps": 0, **WAYS[way]}
    fitted(plugin, model, callbacks=[witness], **options)
    assert len(witness.steps) == plugin.step == 4
    assert bool(model.val_losses) == bool(options.get("limit_val_batches")), "validation did not do what it should"
    assert_histories(found := state(plugin), witness, 3)
    assert {key.split("/")[0] for key in found["amax_history"]} == {*LAYERS}
    assert list(found["channel_amax"]) == ([DOWN] if smooth else [])


def test_the_most_recent_step_alone_is_scaled_by():
    witness, plugin = Witness(), delayed(3, algorithm="most_recent", smooth_swiglu=None)
    fitted(plugin, callbacks=[witness], max_steps=6, limit_train_batches=6)
    assert_histories(state(plugin), witness, 3, in_force=1)


def test_without_a_history_each_step_scales_by_itself():
    def weights(scaling, steps):
        return flat(fitted(FP8Precision(scaling), max_steps=steps).lightning_module)

    assert torch.equal(weights("delayed", 1), weights("current", 1))
    assert not torch.equal(weights("delayed", 2), weights("current", 2))


class Manual(Regression):
    """Manual optimization: a step on several micro-batches, or one on each."""

    def __init__(self, steps=False):
        super().__init__()
        self.automatic_optimization, self.steps = False, steps

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for micro_batch, size in enumerate((1.0, 50.0)):
            if self.steps or not micro_batch:
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch_idx * 2 + micro_batch, size))
            if self.steps or micro_batch:
                optimizer.step()


@pytest.mark.fast("True")
@pytest.mark.parametrize("steps", [False, True])
def test_manual_optimization(steps):
    """Smoothing in the second step of a batch is that of its own channels."""
    witness, plugin, model = Witness(), delayed(3), Manual(steps)
    fitted(plugin, model, callbacks=[witness], max_steps=4, limit_train_batches=4)
    assert len(witness.steps) == plugin.step == 4
    assert_histories(state(plugin), witness, 3)
    amaxes = model.mlp.down_proj.lowbit.amaxes
    assert not amaxes.staged.any(), "something is left of the last step"
    model(torch.full((2, 16), 1e3))
    assert not amaxes.staged.any() and not amaxes.staged_channels.any(), "a pass outside training is recorded"


def test_manual_optimization_with_two_optimizers():
    witness, plugin = Witness(), delayed(smooth_swiglu=None)
    fitted(plugin, GAN(), callbacks=[witness], max_steps=6, limit_train_batches=3)
    assert len(witness.steps) == plugin.step == 6
    assert_histories(found := state(plugin), witness, 4)
    for operand in ("critic/dgrad_g", "generator/wgrad_g"):
        assert found["amax_history"][operand].any(), "what the generator's step alone computes has no history"


def evaluate(trainer, pl_module, *_):
    """In the middle of training, as monitors and generation of samples do."""
    pl_module.eval()
    with torch.no_grad():
        pl_module(torch.full((2, 16), 1e20))
    pl_module.train()


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("smooth", [None, "channel", "token"])
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"]
)
def test_what_callbacks_compute_has_no_part_in_training(hook, smooth):
    def train(*callbacks):
        plugin = FP8Precision(history=4, smooth_swiglu=smooth)
        run = fitted(plugin, accumulate_grad_batches=2, limit_train_batches=4, callbacks=[*callbacks])
        return {"weights": flat(run.lightning_module), "state": state(plugin)}

    assert_same(train(On(**{hook: evaluate})), train(), f"after a pass in {hook}, it")


def test_evaluation_scales_by_the_histories_and_leaves_them_alone():
    model, plugin = Regression(val_size=50.0), FP8Precision(history=4, smooth_swiglu="channel")
    run = fitted(plugin, model, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    before = state(plugin)
    for evaluate in (run.validate, run.test):
        evaluate(model, verbose=False)
    run.predict(model)
    assert_same(state(plugin), before, "evaluation has entered it: state")
    *_, histories, _ = model.val_losses
    trainer(FP8Precision(history=4, smooth_swiglu="channel"), limit_test_batches=2).test(model, verbose=False)
    *_, none, _ = model.val_losses
    assert histories != none, "evaluation does not use the histories"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("same_plugin", [True, False])
@pytest.mark.parametrize("same_model", [True, False])
def test_another_trainer_starts_anew(same_plugin, same_model):
    first = fitted(delayed())
    plugin, witness = first.precision_plugin if same_plugin else delayed(), Witness()
    fitted(plugin, first.lightning_module if same_model else None, callbacks=[witness])
    assert len(witness.steps) == 2
    assert_histories(state(plugin), witness, 4)


def test_another_model_with_other_layers_in_one_trainer():
    run = fitted(FP8Precision(history=4))
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(BoringModel())
    assert {key.split("/")[0] for key in state(run.precision_plugin)["amax_history"]} == {"layer"}


def test_training_goes_on_and_folds_where_evaluation_has_moved_the_histories(monkeypatch):
    """As on a GPU: what is used first in evaluation is moved there, under ``torch.inference_mode``."""
    monkeypatch.setattr(AmaxHistories, "to_", AmaxHistories._place)
    run = fitted(FP8Precision(history=4, smooth_swiglu="channel"), limit_val_batches=1, max_steps=1)
    model = run.lightning_module
    run.validate(model, verbose=False)
    run.fit_loop.epoch_loop.max_steps = 2
    run.fit(model)
    run.validate(model, verbose=False)
    fold(model)
    assert model.mlp.down_proj.full_casts.smooth is None


def test_phases_keep_the_histories_of_what_they_leave_in_high_precision():
    witness, plugin = Witness(), delayed(smooth_swiglu=None)
    fitted(plugin, callbacks=[QAFSwitch(step=2), witness], max_steps=4, limit_train_batches=4)
    assert plugin.phase == "qaf"
    found = state(plugin)["amax_history"]
    for key in found:
        expected = witness.history(key, 4, 4 if "/fprop" in key else 2)
        assert torch.equal(found[key], expected), f"{key} holds {found[key].tolist()}, not {expected.tolist()}"
