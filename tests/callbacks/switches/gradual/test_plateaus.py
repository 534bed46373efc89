"""A plateau starts a gradual switch."""

from math import inf, nan

import pytest
import torch

from lightning_lowbit import PrecisionSwitch
from tests.callbacks.switches.runs import RESUMES, Validated, Witness, fit
from tests.lightning_imports import BoringModel, MisconfigurationException, Trainer
from tests.precision.regression_model import flat, trainer, two_casts
from tests.tables import each

pytestmark = RESUMES
EACH = {"val_check_interval": 1, "limit_val_batches": 1}  # a validation after each batch


@each(
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
        ([nan, nan, 1, 2, 3, 4], {"patience": 3}, 6),
        ([1, nan, nan, 0, 0, 0], {"patience": 2}, 3),
        ([1, -inf, -inf, 0, 0, 0], {"patience": 2}, 3),
        ([inf, inf, 1, 2, 3, 4], {"patience": 2, "mode": "max"}, 2),
    ],
)
def test_begins_after_a_plateau(said, plateau, begin):
    switch = PrecisionSwitch("fqt", plateau=plateau, steps=2)
    expected = [1.0] * 7 if begin is None else [1.0] * begin + [0, 0.5] + [1.0] * 4  # once
    assert fit(switch, model=Validated(*said), max_steps=len(expected), **EACH).blends == expected


def test_a_validation_in_mid_step_counts_for_the_next_one():
    """Steps of two micro-batches, a validation after each third: after steps 1½, 3, 4½ and 6."""
    kwargs = {**EACH, "accumulate_grad_batches": 2, "val_check_interval": 3}
    for patience, begin in [(1, 3), (2, 5), (3, 6)]:
        switch = PrecisionSwitch("fqt", plateau={"patience": patience}, steps=2)
        blends = fit(switch, model=Validated(1), **kwargs).blends
        assert blends.index(0) == begin, f"after {patience} validations without an improvement"


def test_validations_outside_training_do_not_count():
    def seen():
        checkpoint = {}
        switch.on_save_checkpoint(Trainer(logger=False), BoringModel(), checkpoint)
        return [*checkpoint["lightning_lowbit_switches"].values()]

    model, switch = Validated(1), PrecisionSwitch("qaf", plateau={"patience": 9})
    kwargs = {**EACH, "max_steps": 8, "limit_train_batches": 64, "val_check_interval": 2, "num_sanity_val_steps": 1}
    made = trainer(two_casts(), callbacks=[switch], **kwargs)
    made.fit(model)
    assert seen() == [{"due": inf, "best": 1.0, "stalled": 3}], "the sanity check counts"
    made.validate(model, verbose=False)
    made.validate(Validated(1, name="other"), verbose=False)
    assert seen()[0]["stalled"] == 3


def test_the_same_trainer_goes_on():
    model, witness = Validated(3, 2, 2), Witness()
    switch = PrecisionSwitch("fqt", plateau={"patience": 2}, steps=4)
    kwargs = {**EACH, "max_steps": -1, "max_epochs": 1, "num_sanity_val_steps": 0}
    made = trainer(two_casts(), callbacks=[switch, witness], **kwargs)
    for epochs in range(1, 5):  # the fourth validation is in the second epoch
        made.fit_loop.max_epochs = epochs
        made.fit(model)
    assert witness.blends == [1, 1, 1, 1, 0, 0.25, 0.5, 0.75]


def test_a_metric_or_a_validation_that_is_not_there():
    message = "plateau of 'val_los' finds no such metric after a validation, but 'val_loss'. Log it in validation_step"
    with pytest.raises(MisconfigurationException, match=message):
        fit(PrecisionSwitch("qaf", plateau={"monitor": "val_los"}), model=Validated(1), **EACH)
    with pytest.raises(MisconfigurationException, match="waits for validations, and this run has none"):
        fit(PrecisionSwitch("qaf", plateau={}), model=Validated(1))


class Ranks(Validated):
    """The loss falls on rank 0 and stays on rank 1; it is not the mean of both."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0 if self.global_rank else 1 / (1 + self.global_step), sync_dist=False)

    def on_train_end(self):
        torch.save([self.trainer.callbacks[-1].blends, flat(self)], f"{self.global_rank}.pt")


@pytest.mark.filterwarnings("ignore:It is recommended to use .self.log")
@pytest.mark.slow
def test_all_ranks_begin_where_one_sees_a_plateau():
    kwargs = {"devices": 2, "strategy": "ddp_spawn", "use_distributed_sampler": False, "max_steps": 6}
    switch = PrecisionSwitch("fqt", plateau={"patience": 2}, steps=2)
    fit(switch, model=Ranks(), **EACH, **kwargs)
    (blends, weights), (others, other_weights) = (torch.load(f"{rank}.pt") for rank in range(2))
    assert blends == others == [1, 1, 1, 0, 0.5, 1]
    assert torch.equal(weights, other_weights), "the ranks have trained different weights"
