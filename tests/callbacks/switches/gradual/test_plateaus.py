"""A plateau starts a gradual switch."""

import pytest
import torch

from lightning_lowbit import FP4Precision, PrecisionSwitch
from tests.callbacks.switches.gradual.runs import INF, NAN, Validated, blends, seen
from tests.callbacks.switches.runs import RESUMES, Witness, fit
from tests.lightning_imports import MisconfigurationException
from tests.precision.regression_model import flat, trainer
from tests.tables import each

pytestmark = RESUMES


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
        ([NAN, NAN, 1, 2, 3, 4], {"patience": 3}, 6),
        ([1, NAN, NAN, 0, 0, 0], {"patience": 2}, 3),
        ([1, -INF, -INF, 0, 0, 0], {"patience": 2}, 3),
        ([INF, INF, 1, 2, 3, 4], {"patience": 2, "mode": "max"}, 2),
    ],
)
def test_begins_after_a_plateau(said, plateau, begin):
    switch = PrecisionSwitch("fqt", plateau=plateau, steps=2)
    found = blends(switch, model=Validated(*said), max_steps=7, val_check_interval=1, limit_val_batches=1)
    expected = [1.0] * 7
    if begin is not None:
        expected[begin : begin + 2] = [0, 0.5]
        del expected[7:]
    assert found == expected


def test_happens_once():
    found = blends(
        PrecisionSwitch("fqt", plateau={"patience": 1}, steps=2),
        model=Validated(1),
        max_steps=12,
        val_check_interval=1,
        limit_val_batches=1,
    )
    assert found == [1, 1, 0, 0.5] + [1] * 8


def test_a_validation_in_mid_step_counts_for_the_next_one():
    """Steps of two micro-batches, a validation after each third: after steps 1½, 3, 4½ and 6."""
    kwargs = {"accumulate_grad_batches": 2, "val_check_interval": 3, "limit_val_batches": 1}
    for patience, begin in [(1, 3), (2, 5), (3, 6)]:
        switch = PrecisionSwitch("fqt", plateau={"patience": patience}, steps=2)
        found = blends(switch, model=Validated(1), **kwargs)
        assert found.index(0) == begin, f"after {patience} validations without an improvement"


def test_validations_outside_training_do_not_count():
    model, switch = Validated(1), PrecisionSwitch("qaf", plateau={"patience": 9})
    kwargs = {"max_steps": 8, "limit_train_batches": 64, "val_check_interval": 2, "limit_val_batches": 1}
    made = trainer(FP4Precision(quantize_output=True), callbacks=[switch], num_sanity_val_steps=1, **kwargs)
    made.fit(model)
    assert seen(switch) == {"due": INF, "best": 1.0, "stalled": 3}, "the sanity check counts"
    made.validate(model, verbose=False)
    made.validate(Validated(1, name="other"), verbose=False)
    assert seen(switch)["stalled"] == 3


def test_the_same_trainer_goes_on():
    model, witness = Validated(3, 2, 2), Witness()
    switch = PrecisionSwitch("fqt", plateau={"patience": 2}, steps=4)
    kwargs = {"max_steps": -1, "limit_train_batches": 2, "limit_val_batches": 1, "val_check_interval": 1}
    made = trainer(
        FP4Precision(quantize_output=True), callbacks=[switch, witness], num_sanity_val_steps=0, max_epochs=1, **kwargs
    )
    for epochs in range(1, 5):  # the fourth validation is in the second epoch
        made.fit_loop.max_epochs = epochs
        made.fit(model)
    assert witness.blends == [1, 1, 1, 1, 0, 0.25, 0.5, 0.75]


def test_a_metric_that_is_not_there():
    switch = PrecisionSwitch("qaf", plateau={"monitor": "val_los"})
    message = "plateau of 'val_los' finds no such metric after a validation, but 'val_loss'. Log it in validation_step"
    with pytest.raises(MisconfigurationException, match=message):
        fit(switch, model=Validated(1), val_check_interval=1, limit_val_batches=1)


def test_a_run_without_validation():
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
    fit(switch, model=Ranks(), val_check_interval=1, limit_val_batches=1, **kwargs)
    (blends, weights), (others, other_weights) = (torch.load(f"{rank}.pt") for rank in range(2))
    assert blends == others == [1, 1, 1, 0, 0.5, 1]
    assert torch.equal(weights, other_weights), "the ranks have trained different weights"
