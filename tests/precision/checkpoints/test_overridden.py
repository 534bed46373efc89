"""What a checkpoint overrides of the options that a run asks for: said once, and what moves by itself is not."""

import warnings
from functools import partial

import pytest
import torch
from torch.optim import SGD, AdamW, RMSprop, lr_scheduler

from lightning_lowbit import LowBitPrecision, StableSPAM, WeightDecaySwitch
from lightning_lowbit.precision.checkpoints.overridden import asked_options, overridden
from tests.lightning_imports import BoringModel, quiet_trainer
from tests.tables import each

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


class Model(BoringModel):
    def __init__(self, make_optimizer, make_scheduler=None):
        super().__init__()
        self.make_optimizer, self.make_scheduler = make_optimizer, make_scheduler

    def configure_optimizers(self):
        optimizer = self.make_optimizer([{"params": [each]} for each in self.parameters()])
        if self.make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": "step", "monitor": "train_loss"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("train_loss", loss)
        return loss


def fit(model, steps, callbacks=(), ckpt_path=None):
    trainer = quiet_trainer(LowBitPrecision("bf16"), max_steps=steps, limit_val_batches=0, callbacks=[*callbacks])
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


stable_spam = partial(partial, StableSPAM, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
cosine = partial(partial, lr_scheduler.CosineAnnealingLR, T_max=10)


def test_options_that_a_checkpoint_overrides_are_said_once_with_both_values():
    fit(Model(stable_spam(), cosine()), 3).save_checkpoint("first.ckpt")
    other = Model(stable_spam(lr=0.05, betas=(0.5, 0.5), gamma1=0.5), cosine(T_max=20))
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer = fit(other, 4, ckpt_path="first.ckpt")
    (said,) = [str(each.message) for each in caught if "overrides options" in str(each.message)]
    expected = [
        "StableSPAM: lr 0.001 (asked for: 0.05)",
        "StableSPAM: betas (0.9, 0.95) (asked for: (0.5, 0.5))",
        "StableSPAM: gamma1 0.7 (asked for: 0.5)",
        "CosineAnnealingLR: T_max 10 (asked for: 20)",
    ]
    assert trainer.precision_plugin.overridden == expected
    assert f"In force are: {'; '.join(expected)}. To change them" in said
    group = trainer.optimizers[0].param_groups[0]
    assert (group["initial_lr"], group["betas"], group["gamma1"]) == (1e-3, (0.9, 0.95), 0.7), "the claim is wrong"


@each("before, after, lacks", [(AdamW, SGD, "momentum"), (SGD, AdamW, "betas"), (AdamW, RMSprop, "alpha")], fast=1)
def test_a_checkpoint_of_another_optimizer_is_named_in_the_first_step(before, after, lacks):
    fit(Model(partial(before, lr=0.1)), 3).save_checkpoint("first.ckpt")
    with (
        pytest.warns(UserWarning, match="overrides options"),
        pytest.raises(ValueError, match=f"of another optimizer than {after.__name__}: it holds no {lacks}"),
    ):
        fit(Model(partial(after, lr=0.1)), 4, ckpt_path="first.ckpt")


def test_other_errors_of_keys_in_a_step_pass():
    class Failing(Model):
        def training_step(self, batch, batch_idx):
            return {}["mine"]

    with pytest.raises(KeyError, match="mine"):
        fit(Failing(partial(SGD, lr=0.1)), 1)


SCHEDULERS = {
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=8),
    "none": None,
    "cosine": cosine(),
    "milestones": partial(lr_scheduler.MultiStepLR, milestones=[2, 4]),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e9),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2, T_mult=2),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    "one after the other": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


@each("make", SCHEDULERS.values(), fast=1)
def test_what_moves_in_the_course_of_a_run_is_not_said(make):
    """Warnings are errors here. The weight decay is switched before the checkpoint; a cycle moves the betas, too."""
    for optimizer in (partial(AdamW, lr=0.1), partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)):
        fit(Model(optimizer, make), 5, [WeightDecaySwitch(step=2)]).save_checkpoint("first.ckpt")
        trainer = fit(Model(optimizer, make), 6, [WeightDecaySwitch(step=2)], ckpt_path="first.ckpt")
        assert trainer.precision_plugin.overridden == []


def test_options_of_nested_schedulers_and_of_several_groups():
    def made(decay, milestones):
        weights = [{"params": [torch.nn.Parameter(torch.zeros(2))], "weight_decay": each} for each in decay]
        optimizer = AdamW(weights, lr=torch.tensor(0.5))
        first, second = lr_scheduler.MultiStepLR(optimizer, milestones), lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer, lr_scheduler.SequentialLR(optimizer, [first, second], [7])

    optimizer, scheduler = made([0.1, 0.0, 0.0], [3, 1])
    checkpoint = {"optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()]}
    other, other_scheduler = made([0.2, 0.3, 0.3], [2])
    asked = asked_options([other], [other_scheduler])
    expected = [
        "AdamW: weight_decay 0.1 (asked for: 0.2)",
        "AdamW: weight_decay 0.0 (asked for: 0.3)",
        "MultiStepLR: milestones (1, 3) (asked for: (2,))",
    ]
    assert overridden(asked, checkpoint, [other]) == expected
    other.load_state_dict(optimizer.state_dict())
    assert overridden(asked, {}, [other]) == expected[:2], "a sharded checkpoint has been loaded already"


def test_evaluation_has_no_options():
    fit(Model(stable_spam()), 1).save_checkpoint("first.ckpt")
    plugin = LowBitPrecision("bf16")
    trainer = quiet_trainer(plugin, enable_checkpointing=True, enable_model_summary=True)
    trainer.validate(Model(stable_spam(lr=1.0)), ckpt_path="first.ckpt", verbose=False)
    assert plugin.overridden == []
