"""One plugin in several Trainers, as in cross-validation: it has the state of one run."""

from contextlib import nullcontext

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from lightning_lowbit import FP4Precision, FP8Precision, LowBitPrecision
from tests.lightning_imports import MisconfigurationException, quiet_trainer
from tests.precision.fp16.runs import assert_same
from tests.precision.regression_model import On, Regression, flat, state
from tests.tables import each

LOST = "This plugin has been used with another model since it trained this one"


def change_by(change):
    def start(trainer, *_):
        if trainer.global_step == 1:
            change(trainer.precision_plugin)

    return On(on_train_batch_start=start)


def fp4():
    return FP4Precision("nvfp4", compute_dtype="fp32")


def fp8():
    return FP8Precision(history=4, compute_dtype="fp32")


# The plugin, and what changes it. Its state matters in evaluation, but for those named.
STATES = {
    "hp-forward": (fp4, lambda plugin: plugin.set_phase("hp-forward")),
    "bf16": (fp4, lambda plugin: plugin.set_phase("bf16")),
    "qaf": (fp4, lambda plugin: plugin.set_phase("qaf")),
    "pushed": (fp4, lambda plugin: plugin.push_phase("me", "bf16")),
    "blend": (fp4, lambda plugin: plugin.set_blend(0.25)),
    "casts": (fp4, lambda plugin: plugin.set_casts({".*": "int4"})),
    "delayed": (fp8, lambda plugin: None),
    "plain": (fp4, lambda plugin: None),
}
SAME_IN_EVALUATION = ("qaf", "plain")
CASES = [pytest.param(name, marks=[] if name in ("hp-forward", "delayed") else pytest.mark.slow) for name in STATES]
some_states = pytest.mark.parametrize("state", CASES)


def bf16_at_half(plugin):
    plugin.set_phase("bf16")
    plugin.set_blend(0.5)


class Folds:
    """Trainers with one plugin each, or one for all, and their models."""

    def __init__(self, state, one_plugin=True):
        make, change = STATES[state]
        plugins = [make()] * 3 if one_plugin else [make() for _ in range(3)]
        self.trainers = [
            quiet_trainer(plugin, callbacks=[change_by(change)], max_steps=3, limit_val_batches=2, limit_test_batches=2)
            for plugin in plugins
        ]
        self.models = [model(seed) for seed in range(3)]

    def fit(self, fold, **kwargs):
        self.trainers[fold].fit(self.models[fold], **kwargs)

    def loss(self, fold, by=None, **kwargs):
        trainer, one = self.trainers[fold if by is None else by], self.models[fold]
        one.val_losses.clear()
        trainer.validate(one, verbose=False, **kwargs)
        return float(torch.stack(one.val_losses).sum())


def model(seed):
    torch.manual_seed(seed)
    return Regression()


@pytest.mark.fast("delayed")
@pytest.mark.parametrize("state", STATES)
def test_training_and_evaluating_fold_after_fold_is_as_with_plugins_of_their_own(state):
    outcomes = []
    for one_plugin in (True, False):
        folds, losses = Folds(state, one_plugin), []
        for fold in range(3):
            losses.append(folds.loss(fold))  # before it is trained
            folds.fit(fold)
            losses.append(folds.loss(fold))
            folds.trainers[fold].test(folds.models[fold], verbose=False)
            losses.append(float(folds.models[fold].val_losses[-1]))
        outcomes.append([losses, [flat(one) for one in folds.models]])
    assert_same(*outcomes)


@pytest.mark.slow
def test_a_run_without_such_a_state_is_evaluated_after_others():
    folds, apart = Folds("plain"), Folds("plain", one_plugin=False)
    for fold in range(3):
        folds.fit(fold)
        apart.fit(fold)
    assert [folds.loss(fold) for fold in range(3)] == [apart.loss(fold) for fold in range(3)]


@pytest.mark.fast("some-delayed")
@pytest.mark.parametrize("state", [*STATES][:-1])  # of the plain one nothing is gone
@each("between", ["fit", "validate", "fit and validate"], fast=2)
def test_a_run_whose_state_is_gone_is_an_error(state, between):
    folds = Folds(state)
    folds.fit(0)
    folds.trainers[0].save_checkpoint("0.ckpt")
    before = folds.loss(0)
    if "fit" in between:
        folds.fit(1)
    if "validate" in between:
        folds.loss(1)
    first, one = folds.trainers[0], folds.models[0]
    for evaluate in (first.validate, first.test, first.predict, folds.trainers[2].validate):
        with pytest.raises(MisconfigurationException, match=LOST):
            evaluate(one)
    first.fit_loop.epoch_loop.max_steps = 5
    with pytest.raises(MisconfigurationException, match=LOST):
        first.fit(one)
    assert folds.loss(0, ckpt_path="0.ckpt") == before
    assert folds.loss(0) == before, "the checkpoint was not enough"


@some_states
def test_another_trainer_evaluates_a_model_with_the_state_of_its_run(state):
    folds, whole = Folds(state), Folds(state)
    for one in (folds, whole):
        one.fit(0)
    before = folds.loss(0)
    assert folds.loss(0, by=1) == before
    folds.trainers.append(quiet_trainer(STATES[state][0](), limit_val_batches=2))
    alone = folds.loss(0, by=3)
    assert (alone == before) == (state in SAME_IN_EVALUATION), "the state makes no difference"
    for one in (folds, whole):
        one.trainers[0].fit_loop.epoch_loop.max_steps = 5
        one.fit(0)
    assert torch.equal(flat(folds.models[0]), flat(whole.models[0])), "the run did not go on with its state"
    assert folds.trainers[0].precision_plugin.step == 5
    folds.fit(1)  # and another one begins
    assert folds.trainers[1].precision_plugin.step == 3


@some_states
def test_two_models_in_one_trainer(state):
    """Phase, casts and λ are of the run, and histories of a model."""
    folds = Folds(state)
    folds.fit(0)
    before = folds.loss(0)
    folds.loss(1, by=0)
    if state == "delayed":
        with pytest.raises(MisconfigurationException, match=LOST):
            folds.loss(0)
    else:
        assert folds.loss(0) == before


@each("trained, is_origin", [(0, False), (2, False), (2, True), (0, True)], fast=2)
def test_evaluating_a_checkpoint_leaves_training_as_it_was(trained, is_origin):
    """Before the first step, and between two fits of a Trainer; weights, which Lightning replaces, are put back."""
    donor = quiet_trainer(fp8(), callbacks=[change_by(bf16_at_half)], max_steps=3, limit_val_batches=0)
    donor.fit(model(0))
    donor.save_checkpoint("0.ckpt")
    outcomes = []
    for checkpoint in (None, "0.ckpt"):
        plugin = LowBitPrecision.from_checkpoint("0.ckpt") if is_origin else fp8()
        one, change = model(1), change_by(lambda plugin: plugin.set_phase("hp-forward"))
        trainer = quiet_trainer(plugin, callbacks=[change], max_steps=2, limit_val_batches=1)
        if trained:
            trainer.fit(one)
        weights = {name: weight.clone() for name, weight in one.state_dict().items()}
        trainer.validate(one, verbose=False, ckpt_path=checkpoint)
        if checkpoint:
            assert (plugin.phase, float(plugin.blend)) == ("bf16", 0.5), "it is not evaluated as it was trained"
        one.load_state_dict(weights)
        trainer.fit_loop.epoch_loop.max_steps = trained + 2
        trainer.fit(one)
        assert (plugin.phase, float(plugin.blend), plugin.step) == ("hp-forward", 1.0, trained + 2)
        outcomes.append({"weights": flat(one), **state(plugin)["amax_history"]})
    assert_same(*outcomes)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_trainer_resumes_its_run_from_a_checkpoint():
    folds, fresh = Folds("casts"), Folds("casts")
    folds.fit(0)
    folds.trainers[0].save_checkpoint("0.ckpt")
    folds.fit(1)
    for one in (folds, fresh):
        one.trainers[0].fit_loop.epoch_loop.max_steps = 5
        one.fit(0, ckpt_path="0.ckpt")
    assert torch.equal(flat(folds.models[0]), flat(fresh.models[0]))
    assert folds.loss(0) == fresh.loss(0)
    with pytest.raises(MisconfigurationException, match=LOST):
        folds.loss(1)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch for CUDA does not fork after a backward pass")
@each("plugin, warns", [(fp8, True), (fp4, False)])
def test_a_state_that_ends_with_the_process_that_trained_is_told(plugin, warns):
    told = pytest.raises(ProcessRaisedException, match="The processes that trained end now")
    with told if warns else nullcontext():
        quiet_trainer(plugin(), strategy="ddp_fork", devices=1, max_steps=1).fit(model(0))
