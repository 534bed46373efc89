"""Random numbers as a function of the place in the run."""

import pickle
import random

import numpy as np
import pytest
import torch

from lightning_lowbit import CrashSafeCheckpoint, ExactResume
from tests.callbacks.recovery.exact_resume.runs import Augmented, Draws, run, warned
from tests.launch import launch
from tests.lightning_imports import BoringModel, pytorch, quiet_trainer
from tests.precision.regression_model import On
from tests.tables import each


def draws(**kwargs):
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(random.SystemRandom().randrange(2**31))
    run(model := Draws(), resume=ExactResume(**kwargs), max_steps=3, accumulate_grad_batches=2)
    return model.seen


def test_draws_depend_on_the_place_and_the_seed_alone(monkeypatch):
    first = draws()
    assert len(first) == 6
    for generator in range(3):
        assert len({seen[generator] for seen in first}) == 6, "two micro-batches draw the same numbers"
    assert draws() == first
    assert draws(seed=0) == first
    assert not set(draws(seed=1)) & set(first)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert draws() == draws(seed=1)


def test_an_epoch_of_raw_optimizers_draws_other_numbers_than_the_last():
    class Raw(Draws):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx)["loss"])
            self.optimizers(use_pl_optimizer=False).step()

    run(model := Raw(), max_epochs=3)
    assert len(set(model.seen)) == 18


def test_a_trainer_without_the_callback_draws_as_its_user_seeds():
    trainer = run(model := Draws(), max_epochs=1, limit_train_batches=2)
    trainer.callbacks = []
    for epoch in (1, 2):
        trainer.fit_loop.max_epochs = epoch + 1
        torch.manual_seed(5)
        trainer.fit(model)
    assert model.seen[2] not in model.seen[:2]
    assert [draw for draw, *_ in model.seen[2:4]] == [draw for draw, *_ in model.seen[4:]]


@each(
    "first, then, reason",
    [
        ({"max_steps": 4}, {"max_steps": 8}, "leaves out the rest of that epoch"),
        ({"max_steps": 4}, {"max_epochs": 2}, "leaves out the rest of that epoch"),
        ({"max_epochs": 1}, {"max_steps": 8}, "counts batches on from that epoch"),
        ({"max_epochs": 1}, {"max_epochs": 2}, None),
    ],
    fast=2,
)
def test_a_run_continued_at_another_place_gets_a_warning(first, then, reason, tmp_path):
    model, whole = Draws(), Draws()
    run(model, **first).save_checkpoint(tmp_path / "last.ckpt")
    with warned() as messages:
        run(model, ckpt_path=tmp_path / "last.ckpt", **then)
    run(whole, **then)
    assert (model.places == whole.places) == (reason is None)
    messages = [message for message in messages if "its epoch had ended" in message]
    assert len(messages) == (reason is not None) and all(reason in message for message in messages)


@each(
    "callback, at, words",
    [
        (pytorch.callbacks.StochasticWeightAveraging(1e-2), 3, "acts at the start of epochs"),
        (pytorch.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1), 3, "acts at the start of epochs"),
        (pytorch.callbacks.ModelPruning("l1_unstructured"), 9, "without their masks"),
    ],
    fast=1,
)
def test_a_callback_that_does_not_go_on_gets_a_warning(callback, at, words, tmp_path):
    folder = tmp_path / type(callback).__name__
    save = CrashSafeCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run(BoringModel(), save, enable_checkpointing=True, max_epochs=2)
    for step, warns in ((at, True), (6, False)):
        checkpoint = torch.load(folder / f"step={step}.ckpt")
        trainer = quiet_trainer(callbacks=[resume := ExactResume(), callback], max_epochs=2)
        trainer.state.fn = "fit"
        with warned() as messages:
            resume.on_load_checkpoint(trainer, BoringModel(), checkpoint)
        assert any(words in message for message in messages) == warns, (step, messages)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_accumulation_by_epochs_goes_on_within_one(tmp_path):
    def run_of(*callbacks, **kwargs):
        schedule = pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
        settings = {"limit_train_batches": 8, "max_epochs": 2, "enable_checkpointing": bool(callbacks)}
        first = On(on_train_batch_start=lambda trainer, *_: lengths.append(trainer.accumulate_grad_batches))
        lengths, resume = [], ExactResume()
        assert run(Augmented(), schedule, resume, *callbacks, resume=first, **settings, **kwargs).global_step == 10
        return lengths

    saves = CrashSafeCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    assert run_of(saves) == [1] * 8 + [4] * 8
    assert run_of(ckpt_path=tmp_path / "step=9.ckpt") == [4] * 4, "callbacks before it see another length"


class Waits(BoringModel):
    """Notes its learning rate, which falls where a metric of validation stays as it was."""

    def __init__(self):
        super().__init__()
        self.rates = {}

    def training_step(self, batch, batch_idx):
        self.rates[self.trainer.global_step] = self.optimizers().param_groups[0]["lr"]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val", 1.0)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
@each("saves, step", [({"every_n_train_steps": 1}, 7), ({"every_n_train_steps": 1}, 12), ({}, 12)], fast=1)
def test_what_monitors_a_validation_goes_on_with_its_metric(saves, step, tmp_path):
    """Within an epoch; at its end, behind the validation; and behind the end."""

    def rates(*callbacks, ckpt_path=None):
        stop = pytorch.callbacks.EarlyStopping("val", patience=9)
        settings = {"max_epochs": 4, "limit_val_batches": 1, "enable_checkpointing": bool(callbacks)}
        run(model := Waits(), stop, *callbacks, ckpt_path=ckpt_path, **settings)
        return model.rates

    folder = tmp_path / f"{step} of {len(saves)}"
    whole = rates(CrashSafeCheckpoint(folder, filename="{step}", save_top_k=-1, **saves))
    assert len({*whole.values()}) == 3, "no schedule"
    resumed = rates(ckpt_path=folder / f"step={step}.ckpt")
    assert resumed == {at: rate for at, rate in whole.items() if at >= step}


class Falls(Waits):
    """Its learning rate falls after each step or epoch in which a metric of training does not, as it does in step 4."""

    def __init__(self, **schedule):
        super().__init__()
        self.schedule = schedule

    def training_step(self, batch, batch_idx):
        self.log("train", -1.0 if self.trainer.global_step == 3 else 1.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        configured = super().configure_optimizers()
        return configured | {"lr_scheduler": configured["lr_scheduler"] | {"monitor": "train", **self.schedule}}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
@each(
    "schedule, saves, step",
    [
        ({"interval": "step"}, {"every_n_train_steps": 1}, 4),
        ({"interval": "step", "frequency": 2}, {"every_n_train_steps": 1}, 6),
        ({"interval": "epoch", "frequency": 2}, {"every_n_train_steps": 1}, 12),
        ({"interval": "epoch", "frequency": 2}, {}, 6),
    ],
    fast=2,
)
def test_a_schedule_by_a_training_metric_takes_the_step_that_follows_the_checkpoint(schedule, saves, step, tmp_path):
    def rates(*callbacks, ckpt_path=None):
        enable = bool(callbacks)
        run(model := Falls(**schedule), *callbacks, ckpt_path=ckpt_path, max_epochs=5, enable_checkpointing=enable)
        return model.rates

    folder = tmp_path / f"{schedule}, {step}"
    whole = rates(CrashSafeCheckpoint(folder, filename="{step}", save_top_k=-1, **saves))
    assert len({*whole.values()}) > 1, "no schedule"
    assert rates(ckpt_path=folder / f"step={step}.ckpt") == {at: rate for at, rate in whole.items() if at >= step}


class Ends(BoringModel):
    def on_train_epoch_end(self):
        pass


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
@each("model, step, warns", [(Ends, 6, True), (Ends, 5, False), (BoringModel, 6, False)])
def test_the_end_of_an_epoch_that_is_left_out_gets_a_warning(model, step, warns, tmp_path):
    folder = tmp_path / f"{model.__name__}, {step}"
    save = CrashSafeCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run(model(), save, enable_checkpointing=True, max_epochs=1)
    with warned() as messages:
        run(model(), ckpt_path=folder / f"step={step}.ckpt", max_epochs=2)
    assert any("that of Ends (on_train_epoch_end)" in message for message in messages) == warns, messages


class Thaws(BoringModel):
    """The weight or the bias is frozen; in the second epoch alone they change places."""

    frozen = "layer.bias"

    def on_fit_start(self):
        self.get_parameter(self.frozen).requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            for parameter in self.parameters():
                parameter.requires_grad_(not parameter.requires_grad)


@each("epochs, warns", [(1, False), (2, True)])
def test_other_frozen_parameters_than_in_the_checkpoint_get_a_warning(epochs, warns, tmp_path):
    path = tmp_path / f"{epochs}.ckpt"
    run(Thaws(), max_epochs=epochs).save_checkpoint(path)
    with warned() as messages:
        run(Thaws(), ckpt_path=path, max_epochs=3)
    messages = [message for message in messages if "differs from the one that saved the checkpoint" in message]
    texts = ["layer.bias, trained then and frozen here", "layer.weight, frozen then and trained here"]
    assert len(messages) == 2 * warns and all(map(str.__contains__, messages, texts)), messages


class Stops(BoringModel):
    def training_step(self, batch, batch_idx):
        raise RuntimeError


def test_a_trainer_at_rest_can_be_pickled():
    trainer = run(BoringModel(), max_epochs=1)
    pickle.dumps(trainer)
    trainer.fit(BoringModel())  # has no epoch left
    pickle.dumps(trainer)
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(RuntimeError):
        trainer.fit(Stops())
    pickle.dumps(trainer)


def test_ranks_draw_alike_where_they_share_a_batch(tmp_path):
    """With tensor parallelism they must, for replicated weights to stay the same."""
    first, second = launch("tests.callbacks.recovery.ranks_exact_resume", 2, tmp_path, "ddp", "tp")
    assert first["tp"] == second["tp"]
    assert first["ddp"] == first["tp"] and not set(first["ddp"]) & set(second["ddp"])
