"""Curves of the loss scale, its state and the report."""

import pytest
import torch

from lightning_lowbit import LossScaleMonitor, StaticGradScaler
from lightning_lowbit.report.html import Text
from tests.callbacks.monitors.loss_scale.runs import (
    PLUGINS,
    Scripted,
    conservative,
    lowbit,
    mixed,
    sgd,
    silent,
    torchs,
    trainer,
    warned,
)
from tests.curves import event_curves
from tests.lightning_imports import Callback, TensorBoardLogger
from tests.tables import each


class Manual(Scripted):
    """Two optimizers that step in every batch, each after a backward pass of its own."""

    automatic_optimization = False

    def __init__(self, overflows=()):
        super().__init__()
        self.overflows = overflows

    def training_step(self, batch, batch_idx):
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(self.mean(batch, number))
            optimizer.step()

    def configure_optimizers(self):
        return [sgd(layer) for layer in self.layer]


def logged(run):
    """By the step it was logged at."""
    curves = event_curves(run, first=0)
    return {step: {name.removeprefix("loss_scale/"): v for name, v in row.items()} for step, row in curves.items()}


def fit(monitor, plugin, model, **kwargs):
    run = trainer(monitor, plugin=plugin, logger=TensorBoardLogger("."), **kwargs)
    run.fit(model)
    return run


def expected(seen, every):
    """Lightning numbers the first step 0. Overflows are those since the last point, skipped steps all of them."""
    return {
        step: {
            **seen[step],
            "overflows": sum(one["overflows"] for one in seen[step - every + 1 : step + 1]),
            "skipped_steps": sum(one["overflows"] for one in seen[: step + 1]),
        }
        for step in range(every - 1, len(seen), every)
    }


def reported(monitor, run):
    (section,) = monitor.report_sections(run)
    assert section.title == "Loss scale"
    return [block.text for block in section.blocks if isinstance(block, Text)]


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_curves_are_what_the_module_reads(plugin, every, accumulate):
    # With two micro-batches: in both of a step, in the second of one, in the first of one.
    model = Scripted({2, 3, 7, 12} if accumulate == 2 else {1, 2, 6})
    options = {"log_every_n_steps": every, "accumulate_grad_batches": accumulate, "max_steps": 9}
    run = fit(LossScaleMonitor(falls=20), plugin(), model, **options)
    assert sum(one["overflows"] for one in model.seen) == 3, "the run does not test what it should"
    assert logged(run) == expected(model.seen, every)


def test_falls_of_a_first_scale_that_is_too_large_do_not_count():
    """Before a step is taken it only finds its place; at its floor it does not."""
    silent(conservative(), {0, 1, 2, 3, 5}, falls=2, within=8)
    warned("Loss scale, step 7: 2 overflows", conservative(), {0, 1, 2, 3, 5, 6}, falls=2, within=8)
    warned("Loss scale, step 2: 2 overflows", conservative(floor=2.0**9), {0, 1, 2}, falls=2, within=20)


@each("plugin", [lambda: lowbit(conservative()), lambda: mixed(torchs())], fast=1)
def test_each_of_two_optimizers_counts(plugin):
    monitor, model = LossScaleMonitor(), Manual({(0, 1), (2, 0), (3, 0), (3, 1)})
    run = fit(monitor, plugin(), model, max_steps=12, log_every_n_steps=2)
    assert [one["overflows"] for one in model.seen] == [1, 0, 1, 2, 0, 0]
    assert logged(run) == expected(model.seen, 2)
    text = "4 of 12 optimizer steps were skipped, since a gradient was not finite. The loss scale ended at "
    assert reported(monitor, run) == [f"{text}{model.seen[-1]['scale']:g}."]
    with pytest.warns(UserWarning, match="2 overflows came within 2 optimizer steps, .*; it is now 256."):
        trainer(LossScaleMonitor(falls=2, within=2), plugin=plugin()).fit(Manual({(1, 0), (1, 1)}))


def test_a_batch_without_a_step_counts_nothing():
    class Skips(Manual):
        def training_step(self, batch, batch_idx):
            if batch_idx % 2:
                super().training_step(batch, batch_idx)

    monitor = LossScaleMonitor()
    run = trainer(monitor, max_steps=-1, max_epochs=1, limit_train_batches=6)
    run.fit(Skips({(1, 0)}))
    assert reported(monitor, run)[0].startswith("1 of 6 optimizer steps were skipped")


# An epoch is a step: Lightning resumes with the next epoch.
SHORT = {"limit_train_batches": 1, "log_every_n_steps": 3}


@each("before, after", [(3, 3), (2, 3), (5, 3), (3, 4)], fast=2)
def test_falls_before_the_checkpoint_count(before, after):
    """Also with another number of them, of which as many are known as were looked at."""
    run = trainer(LossScaleMonitor(before), max_steps=5, **SHORT)
    run.fit(Scripted({4} if before == 2 else {3, 4}))
    run.save_checkpoint("half.ckpt")
    later = {5, 6, 7, 8} if before == 2 or after == 4 else {5}
    with pytest.warns(UserWarning, match=f"step 9: {after} overflows came within 100 optimizer steps"):
        resumed = trainer(LossScaleMonitor(after), max_steps=9, **{**SHORT, "log_every_n_steps": 9})
        resumed.fit(Scripted(later), ckpt_path="half.ckpt", weights_only=True)


def test_what_was_not_said_before_the_checkpoint_is_said_after_it():
    class Save(Callback):
        def on_train_batch_end(self, run, *_):
            if run.global_step == 4:
                run.save_checkpoint("half.ckpt")

    run = trainer(LossScaleMonitor(3, 3), Save(), max_steps=4, limit_train_batches=1)
    with pytest.warns(UserWarning, match="step 4: 3 overflows came within 3"):
        run.fit(Scripted({1, 2, 3}))
    with pytest.warns(UserWarning, match="step 5: 3 overflows came within 3"):
        again = trainer(LossScaleMonitor(3, 3), max_steps=8, limit_train_batches=1)
        again.fit(Scripted(), ckpt_path="half.ckpt", weights_only=True)


@each(
    "make, overflows, every",
    [
        (torchs, {1, 4}, 1),
        (torchs, {1, 4}, 3),
        (lambda: StaticGradScaler(2.0**10, device="cpu"), {1, 4, 5}, 1),
        (lambda: conservative(hysteresis=3), {1, 4, 5}, 1),
        (lambda: conservative(floor=2.0**10), {1, 4, 5}, 1),
        (lambda: conservative(cap=2.0**10, growth_interval=1, cooldown=0), {1, 4, 5}, 1),
    ],
    fast=2,
)
def test_a_fused_optimizer_shows_overflows_in_the_scale_alone(make, overflows, every):
    """Under Lightning's plugin it unscales within its step; the scale falls, or is static, tolerant or at a bound."""
    model = Scripted(overflows, lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True))
    run = fit(LossScaleMonitor(), mixed(make()), model, log_every_n_steps=every)
    if make is torchs:
        assert [one["scale"] for one in model.seen][:5] == [2**10, 2**9, 2**9, 2**9, 2**8]
    assert logged(run) == expected(model.seen, every)
