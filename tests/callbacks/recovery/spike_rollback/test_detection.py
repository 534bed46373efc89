"""What a spike is, after how many the rollback gives up, and what is said of them."""

import math
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_lowbit import RunReport, SpikeRollback
from tests.callbacks.recovery.spike_rollback.runs import (
    BAD,
    KEPT,
    Scripted,
    assert_same,
    fit,
    rollback,
    rolled_back,
    steps,
    trainer,
)
from tests.curves import event_curves
from tests.lightning_imports import BoringModel, TensorBoardLogger


def test_only_what_is_not_finite_counts_before_it_is_armed():
    callback = rollback(warmup_steps=12)
    fit(Scripted(range(20), {BAD: "spike"}, "AdamW"), callback)
    assert steps(callback) == []
    rolled_back(callback)
    assert steps(callback) == [(13, 11, 8)]


class Losses(BoringModel):
    """Has the losses it is given, whatever the weights."""

    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    def training_step(self, batch, batch_idx):
        loss = self.losses[batch_idx]
        return None if math.isnan(loss) else self.layer(batch).sum() * 0 + loss

    def train_dataloader(self):
        return DataLoader(torch.randn(len(self.losses), 32))


def judged(losses, accumulate=1, **kwargs):
    """A callback that has judged these losses."""
    callback = rollback(**kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SpikeRollback")
        warnings.filterwarnings("ignore", "`training_step` returned `None`")
        trainer(callback, limit_val_batches=0, accumulate_grad_batches=accumulate).fit(Losses(losses))
    return callback


def is_spike(*losses, **kwargs):
    return bool(steps(judged(losses, warmup_steps=2, **kwargs)))


def test_the_rule():
    """Mean 2 and deviation 1 of 1 and 3; of 2 and 2 the deviation counts as 0.02. Bounds are those of float32."""
    assert is_spike(1, 3, 8.01)
    assert not is_spike(1, 3, 7.99)
    assert is_spike(2, 2, 2.1201)
    assert not is_spike(2, 2, 2.1199)
    assert is_spike(1, 3, 5.01, threshold=3.0)
    assert is_spike(-2, -2, -1.8799), "a mean below 0"
    assert not is_spike(-2, -2, -1.8801)
    assert is_spike(1, 3, -math.inf)
    assert not is_spike(1, 3, -1e6), "below the mean there is no spike"
    assert is_spike(9, 1, 3, 8.01, history=2), "the 9 is too long ago to count"
    assert not is_spike(9, 1, 3, 8.01, history=3)


def test_the_loss_is_the_mean_over_micro_batches():
    """Also in the last step of an epoch, which has one of two; and where one of them has no loss."""
    steady = [1, 3, 3, 1, 2, 2]  # means of 2, 2, 2
    assert not is_spike(*steady, 2.11, accumulate=2), "the lone micro-batch counts as half a step, or twice"
    assert is_spike(*steady, 2.13, accumulate=2)
    assert is_spike(*steady, 1.13, 3.13, accumulate=2)
    assert not is_spike(*steady, 1.11, 3.11, accumulate=2)
    assert not is_spike(*steady, math.nan, 2.11, accumulate=2), "a micro-batch without a loss was counted"
    assert not is_spike(*steady, math.nan, math.nan, accumulate=2), "no loss is no spike"
    assert judged([1, 3, 4, 5, 6], accumulate=2).state_dict()["good"] == [2, 4.5, 6]


def test_goes_back_between_steps_with_micro_batches():
    model = rolled_back(
        rollback(),
        model=Scripted(range(40), {2 * BAD: "spike"}),
        says="The loss of step 11 .* continues with the weights of step 8",
        accumulate_grad_batches=2,
    )
    kept = [2 * step + half for step in KEPT for half in (0, 1)]
    assert_same(model.end, fit(Scripted(kept), accumulate_grad_batches=2).end, "not the run without these batches")


def test_validates_what_has_been_judged():
    class Validated(Scripted):
        def validation_step(self, batch, batch_idx):
            if not self.trainer.sanity_checking:
                self.validated.append(self.everything())

        def val_dataloader(self):
            return DataLoader(range(1))

    model = Validated(range(12), {BAD: "spike"})
    model.validated = []
    rolled_back(callback := rollback(), model=model, val_check_interval=4)
    assert steps(callback) == [(12, 11, 8)]
    assert len(model.validated) == 3
    assert_same(model.validated[-1], fit(Scripted(range(8))).end, "the bad update was validated")


def test_nothing_is_read_within_a_step_and_nothing_of_the_last_one():
    """A number of a tensor is what a device has to be waited for. The one that is read is older than a step."""
    read = []

    class Watched(SpikeRollback):
        def on_train_batch_start(self, run, *args):
            before = [one.step for one in self._losses.pending]
            super().on_train_batch_start(run, *args)
            after = [one.step for one in self._losses.pending]
            read.extend((run.global_step, step) for step in before if step not in after)

        def on_train_batch_end(self, *args):
            class Refuse(TorchDispatchMode):
                def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                    assert func is not torch.ops.aten._local_scalar_dense.default, "a number was read"
                    return func(*args, **(kwargs or {}))

            with Refuse():
                super().on_train_batch_end(*args)

    fit(Scripted(range(10)), Watched(warmup_steps=2))
    assert read == [(step, step - 2) for step in range(2, 10)]


@pytest.mark.fast("1")
@pytest.mark.parametrize("within", [1, 1000])
def test_gives_up_without_progress(within):
    """From step 10 on all losses are bad: each time two more steps are taken; the good snapshot stays the same one."""
    callback, model = rollback(max_rollbacks=2, within=within), Scripted(range(40), dict.fromkeys(range(10, 40), "nan"))
    told = r"step 14 is nan.* has gone back 2 times since step 12 \(max_rollbacks=2\).* those of step 8"
    with pytest.warns(UserWarning, match="SpikeRollback"), pytest.raises(RuntimeError, match=told):
        fit(model, callback)
    assert_same(model.everything(), fit(Scripted(range(8))).end, "the weights were not put back")


@pytest.mark.fast("17-True")
@pytest.mark.parametrize(("within", "gives_up"), [(16, False), (17, True)])
def test_gives_up_within_a_window_only(within, gives_up):
    """Spikes at 8 and 24, and with them rollbacks at 10 and 26, from different snapshots."""
    told = pytest.raises(RuntimeError, match="max_rollbacks=1") if gives_up else nullcontext()
    with told:
        rolled_back(rollback(max_rollbacks=1, within=within), model=Scripted(range(40), {8: "nan", 24: "nan"}))


@pytest.mark.slow
def test_a_run_that_has_converged_goes_on():
    """Near 0 every loss is many times the mean; those that are not small have gone back as often as they may."""
    start, settled = [1.0, 1.1, 0.9, 1.0], [1e-6 * (1 + i % 3) for i in range(8)]
    limits = {"history": 4, "max_rollbacks": 2}
    assert steps(judged([*start, *settled, 3e-5, *settled, 2e-4, *settled], **limits)) == []
    rollbacks = judged([*start, *[*settled, 0.05] * 6], **limits).state_dict()["rollbacks"]
    assert [round(one["loss"], 6) for one in rollbacks] == [0.05] * 2, "it goes on, far below its first losses"
    with pytest.raises(RuntimeError, match="no batch that is to"):
        judged([*start, *[*settled, 0.5] * 6], **limits)


def test_logged():
    run = trainer(rollback(), logger=TensorBoardLogger("."))
    with pytest.warns(UserWarning, match="SpikeRollback"):
        run.fit(model := Scripted(range(20), {BAD: "nan"}))
    curves = event_curves(run, lambda name: name.startswith("spike_rollback/"), first=0)
    assert {step: row["spike_rollback/rollbacks"] for step, row in curves.items()} == {
        step: float(step >= 13) for step in range(20)
    }
    assert [step for step, row in curves.items() if "spike_rollback/mean" in row] == list(range(5, 20)), (
        "after four good losses, the last of which is read in step 5"
    )
    for step in (5, 12, 13):
        good = torch.tensor(model.losses[: min(step - 1, 11)], dtype=torch.float64)
        mean, limit = float(good.mean()), float(good.mean() + 6 * good.std(correction=0))
        assert curves[step]["spike_rollback/mean"] == pytest.approx(mean, rel=1e-6)
        assert curves[step]["spike_rollback/limit"] == pytest.approx(limit, rel=1e-6)


def test_reported():
    rolled_back(RunReport(), rollback())
    page = Path("report.html").read_text()
    assert "Spikes" in page
    assert "Rollbacks: 1." in page
    assert f'<td class="number">{BAD + 1}</td>' in page, "charts count the first step as 1"
    fit(Scripted(range(4)), RunReport(), rollback())
    assert "No loss spiked." in Path("version_1/report.html").read_text()
