"""Training in FP8: losses, histories, and what has no part in them."""

import pytest
import torch

from lightning_lowbit import FP8Precision, LowBitPrecision, QAFSwitch
from lightning_lowbit.nn import AmaxHistories, fold
from tests.lightning_imports import BoringModel, Callback
from tests.precision.base.models import GAN
from tests.precision.regression_model import (
    DOWN,
    LAYERS,
    Regression,
    Witness,
    assert_histories,
    assert_in_force,
    flat,
    state,
    trainer,
)

SCALINGS = ("delayed", "current", "row", "blockwise", "mx")


@pytest.mark.fast("delayed-token", "current-channel", "blockwise-None")
@pytest.mark.parametrize("smooth", [None, "channel", "token"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_loss_falls(scaling, smooth):
    def train(plugin):
        model = Regression()
        trainer(plugin, max_steps=40, limit_train_batches=20, limit_val_batches=4).fit(model)
        first, last = torch.stack(model.val_losses[2:6]).mean(), torch.stack(model.val_losses[-4:]).mean()
        return first, last

    first, last = train(FP8Precision(scaling, smooth_swiglu=smooth, history=4 if scaling == "delayed" else 16))
    assert last < 0.4 * first, f"the loss only falls from {first:.3f} to {last:.3f}"
    in_bf16 = train(LowBitPrecision("bf16"))[1]
    assert last < 1.5 * in_bf16, f"the loss falls to {last:.3f}, in bf16 to {in_bf16:.3f}"


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
    model, witness = Regression(recompute, val_size=100.0), Witness()
    plugin = FP8Precision(history=3, smooth_swiglu=smooth, compute_dtype="fp32")
    options = {"max_steps": 4, "limit_train_batches": 4, "num_sanity_val_steps": 0, **WAYS[way]}
    made = trainer(plugin, callbacks=[witness], **options)
    made.fit(model)
    assert len(witness.steps) == plugin.step == 4
    assert bool(model.val_losses) == bool(options.get("limit_val_batches")), "validation did not do what it should"
    found = state(plugin)
    assert {key.split("/")[0] for key in found["amax_history"]} == set(LAYERS)
    assert_histories(found["amax_history"], witness, 3)
    assert_in_force(found["amax_history"], witness, 3)
    assert list(found["channel_amax"]) == ([DOWN] if smooth else [])
    for name, amax in found["channel_amax"].items():
        assert torch.equal(amax, witness.channels[name]), "the channels are not those of the last step"


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_each_step_scales_by_the_steps_before_it(algorithm):
    witness, plugin = Witness(), FP8Precision(history=3, algorithm=algorithm, compute_dtype="fp32")
    trainer(plugin, callbacks=[witness], max_steps=6, limit_train_batches=6).fit(Regression())
    found = state(plugin)["amax_history"]
    assert_in_force(found, witness, 1 if algorithm == "most_recent" else 3)
    in_force = torch.stack([amaxes for _, amaxes in witness.in_force["head"]])
    assert (in_force[0] == 0).all(), "before the first step there is nothing to scale by"
    assert (in_force[1:] > 0).all(), "the second step still scales by its own amaxes"


def test_without_a_history_each_step_scales_by_itself():
    """One step of delayed scaling is one of current scaling; two are not, or the histories are not used."""

    def weights(scaling, steps):
        model = Regression()
        trainer(FP8Precision(scaling), max_steps=steps).fit(model)
        return flat(model)

    assert torch.equal(weights("delayed", 1), weights("current", 1))
    assert not torch.equal(weights("delayed", 2), weights("current", 2))


class Manual(Regression):
    """Manual optimization of several micro-batches."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for micro_batch in range(2):
            self.manual_backward(self.loss(batch_idx * 2 + micro_batch, 1.0 + micro_batch))
        optimizer.step()


@pytest.mark.parametrize("smooth", [None, "channel"])
def test_manual_optimization(smooth):
    witness, plugin = Witness(), FP8Precision(history=3, smooth_swiglu=smooth, compute_dtype="fp32")
    trainer(plugin, callbacks=[witness], max_steps=4, limit_train_batches=4).fit(Manual())
    assert len(witness.steps) == plugin.step == 4
    found = state(plugin)
    assert_histories(found["amax_history"], witness, 3)
    for name, amax in found["channel_amax"].items():
        assert torch.equal(amax, witness.channels[name]), "the channels are not those of the last step"


def test_manual_optimization_with_two_optimizers():
    """Each step of each optimizer is a step of the histories, also the second one of a batch."""
    witness, plugin = Witness(), FP8Precision(history=4, compute_dtype="fp32")
    trainer(plugin, callbacks=[witness], max_steps=6, limit_train_batches=3).fit(GAN())
    assert len(witness.steps) == plugin.step == 6
    found = state(plugin)["amax_history"]
    assert found["critic/dgrad_g"].any(), "what the generator's step alone computes has no history"
    assert found["generator/wgrad_g"].any(), "what the generator's step alone computes has no history"
    assert_histories(found, witness, 4)
    assert_in_force(found, witness, 4)


def test_smoothing_in_the_second_step_of_a_batch_is_that_of_its_own_channels():
    class Twice(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            for size in (1.0, 50.0):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch_idx, size))
                optimizer.step()

    witness, plugin = Witness(), FP8Precision(history=2, smooth_swiglu="channel", compute_dtype="fp32")
    trainer(plugin, callbacks=[witness], max_steps=4, limit_train_batches=2).fit(Twice())
    found = state(plugin)
    assert torch.equal(found["channel_amax"][DOWN], witness.channels[DOWN]), "the second pass has not been recorded"
    assert_histories(found["amax_history"], witness, 2)


def test_after_manual_optimization_nothing_is_recorded():
    model, plugin = Manual(), FP8Precision(history=2, smooth_swiglu="channel", compute_dtype="fp32")
    trainer(plugin).fit(model)
    down = model.mlp.down_proj
    assert not down.lowbit.amaxes.staged.any(), "something is left of the last step"
    model(torch.full((2, 16), 1e3))
    assert not down.lowbit.amaxes.staged.any() and not down.lowbit.amaxes.staged_channels.any(), (
        "a pass outside training is recorded"
    )


class Sample(Callback):
    """Evaluates the model in the middle of training, as monitors and generation of samples do."""

    def __init__(self, hook):
        def evaluate(trainer, pl_module, *args):
            pl_module.eval()
            with torch.no_grad():
                pl_module(torch.full((2, 16), 1e20))
            pl_module.train()

        setattr(self, hook, evaluate)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("smooth", [None, "channel", "token"])
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"]
)
def test_what_callbacks_compute_has_no_part_in_training(hook, smooth):
    def train(callbacks):
        model, plugin = Regression(), FP8Precision(history=4, smooth_swiglu=smooth)
        trainer(plugin, accumulate_grad_batches=2, limit_train_batches=4, callbacks=callbacks).fit(model)
        return flat(model), state(plugin)

    (weights, alone), (others, sampled) = train([]), train([Sample(hook)])
    for key, amaxes in alone["amax_history"].items():
        assert torch.equal(sampled["amax_history"][key], amaxes), f"a pass in {hook} has entered the history of {key}"
    for key, amaxes in alone["channel_amax"].items():
        assert torch.equal(sampled["channel_amax"][key], amaxes), f"a pass in {hook} has entered the channels of {key}"
    assert torch.equal(others, weights), f"a pass in {hook} has changed what is trained"


def test_evaluation_scales_by_the_histories_and_leaves_them_alone():
    model, plugin = Regression(val_size=50.0), FP8Precision(history=4, smooth_swiglu="channel")
    made = trainer(plugin, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    made.fit(model)
    before = state(plugin)
    evaluations = (made.validate, made.test)
    for evaluate in evaluations:
        evaluate(model, verbose=False)
    made.predict(model)
    after = state(plugin)
    assert torch.equal(after["channel_amax"][DOWN], before["channel_amax"][DOWN])
    for key, amaxes in before["amax_history"].items():
        assert torch.equal(after["amax_history"][key], amaxes), f"evaluation has entered the history of {key}"
    *_, histories, _ = model.val_losses
    trainer(FP8Precision(history=4, smooth_swiglu="channel"), limit_test_batches=2).test(model, verbose=False)
    *_, none, _ = model.val_losses
    assert histories != none, "evaluation does not use the histories"


@pytest.mark.parametrize("same_plugin", [True, False])
@pytest.mark.parametrize("same_model", [True, False])
def test_another_trainer_starts_anew(same_plugin, same_model):
    model, plugin = Regression(), FP8Precision(history=4, smooth_swiglu="channel", compute_dtype="fp32")
    first = trainer(plugin)
    first.fit(model)
    model = model if same_model else Regression()
    other = plugin if same_plugin else FP8Precision(history=4, smooth_swiglu="channel", compute_dtype="fp32")
    witness = Witness()
    second = trainer(other, callbacks=[witness])
    second.fit(model)
    found = state(other)
    assert len(witness.steps) == 2
    assert_histories(found["amax_history"], witness, 4)
    assert_in_force(found["amax_history"], witness, 4)


def test_another_model_with_other_layers_in_one_trainer():
    made = trainer(FP8Precision(history=4))
    made.fit(Regression())
    made.fit_loop.epoch_loop.max_steps = 4
    model = BoringModel()
    made.fit(model)
    assert {key.split("/")[0] for key in state(made.precision_plugin)["amax_history"]} == {"layer"}


def test_training_goes_on_and_folds_where_evaluation_has_moved_the_histories(monkeypatch):
    """As on a GPU: what is used first in evaluation is moved there, under ``torch.inference_mode``."""
    monkeypatch.setattr(AmaxHistories, "to_", AmaxHistories._place)
    model, plugin = Regression(), FP8Precision(history=4, smooth_swiglu="channel")
    made = trainer(plugin, limit_val_batches=1, max_steps=1)
    made.fit(model)
    made.validate(model, verbose=False)
    made.fit_loop.epoch_loop.max_steps = 2
    made.fit(model)
    made.validate(model, verbose=False)
    fold(model)
    assert model.mlp.down_proj.full_casts.smooth is None


def test_phases_keep_the_histories_of_what_they_leave_in_high_precision():
    witness = Witness()
    plugin = FP8Precision(history=4, compute_dtype="fp32")
    trainer(plugin, callbacks=[QAFSwitch(step=2), witness], max_steps=4, limit_train_batches=4).fit(Regression())
    assert plugin.phase == "qaf"
    found = state(plugin)["amax_history"]
    for key in found:
        expected = witness.history(key, 4, 4 if "/fprop" in key else 2)
        assert torch.equal(found[key], expected), f"{key} holds {found[key].tolist()}, not {expected.tolist()}"
