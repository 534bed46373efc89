"""Which weights are reset, and when."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowbit import Cast, IntegerPrecision, RunReport, Scale, quantize
from lightning_lowbit.callbacks.osci_reset import OsciReset
from tests.callbacks.osci_reset.weights import (
    MOVES,
    PLUGIN,
    WEIGHT,
    Row,
    Scripted,
    Watch,
    fit,
    logged,
    reset_at,
    trainer,
)
from tests.lightning_imports import CSVLogger, RandomDataset
from tests.precision.regression_model import On
from tests.tables import each

TREMBLE = ["oscillating", "oscillating below 0"]


def test_what_oscillates_is_set_to_its_center():
    weights = fit(OsciReset(window=10, every=20))
    assert reset_at(weights) == {10: TREMBLE}
    after = dict(zip(MOVES, weights[9].flatten().tolist(), strict=True))
    assert after["oscillating"] == pytest.approx(2.0), "2.49 is rounded to 2"
    assert after["oscillating below 0"] == 0.0
    torch.testing.assert_close(weights[8], WEIGHT[9])
    rest = [i for i, name in enumerate(MOVES) if name not in TREMBLE]
    assert torch.allclose(weights[9][0, rest], WEIGHT[10][0, rest]), "others have been moved"


@each(
    "threshold, caught",
    [
        (51.0, []),
        (49.0, TREMBLE),
        (4.5, [*TREMBLE, "crossing once"]),
        (2.2, [*TREMBLE, "oscillating widely", "crossing once"]),
        (1.2, [*TREMBLE, "oscillating widely", "crossing once"]),
    ],
    fast=2,
)
def test_the_ratio_of_two_paths(threshold, caught):
    """50 for what oscillates, 5 for what crosses a threshold once, 2.5 for wide steps, 1 for what travels."""
    weights = fit(OsciReset(window=10, every=20, threshold=threshold))
    assert reset_at(weights) == ({10: caught} if caught else {})


@each(
    "rest, move, threshold",
    [
        # The largest element trembles by 5 %, and with it all quantized values, by much more than the weights move.
        ([1.1, -2.1, 4.2, -6.2, 3.2, 0.1, 2.2], 0.001, 8.0),
        # It moves thresholds across weights that rest: codes flip, and yet these do not oscillate.
        ([1.52, -2.6, 4.55, -6.6, 3.6, 0.51, 2.51], 0.0, 1.01),
    ],
)
def test_a_scale_that_changes_is_no_jump(rest, move, threshold):
    script = WEIGHT.clone()
    script[1::2, 0, 0] = 7.35
    script[:, 0, 1:] = torch.tensor(rest)
    script[1::2, 0, 1:] += move
    levels = quantize(script.squeeze(1), Cast("int4", Scale("fp32", "row")))
    flips = (levels.codes[0] != levels.codes[1]).sum()
    assert flips == 0 if move else flips > 2, "the script does not test what it should"
    assert (levels.dequantize()[0] - levels.dequantize()[1]).abs()[-1] > 8 * move
    assert reset_at(fit(OsciReset(window=10, every=20, threshold=threshold), model=Row(script)), script) == {}


def test_a_zero_point():
    """Rows from -8 to 7: levels are whole numbers, and codes count from -8."""
    script = torch.cat([torch.full((64, 1, 1), -8.0), WEIGHT], -1)
    weights = fit(OsciReset(window=10, every=20), model=Row(script), plugin=IntegerPrecision(symmetric=False, **PLUGIN))
    changed = (weights[9] - script[10]).abs() > 1e-3
    assert changed.flatten().nonzero().flatten().tolist() == [2, 3]
    assert weights[9][0, 2:4].tolist() == pytest.approx([2.0, 0.0])


def test_weights_stored_the_other_way_round():
    from transformers.pytorch_utils import Conv1D

    model = Row()
    model.layer = Conv1D(1, len(MOVES))
    model.layer.weight.data = WEIGHT[0].t().clone()
    model.layer.bias.requires_grad_(False)
    model.configure_optimizers = lambda: Scripted([model.layer.weight], WEIGHT)
    model.train_dataloader = lambda: DataLoader(RandomDataset(len(MOVES), 64), batch_size=1)
    weights = [weight.t() for weight in fit(OsciReset(window=10, every=20), model=model)]
    assert reset_at(weights) == {10: TREMBLE}


@each(
    "arguments, ends",
    [
        ({"window": 4, "every": 10}, [4, 14, 24]),
        ({"window": 4, "every": 10, "start": 5}, [9, 19, 29]),
        ({"window": 4, "every": 10, "start": 25}, [29]),
        ({"window": 4, "every": 4}, [4, 8, 12, 16, 20, 24, 28]),
        ({}, []),
    ],
    fast=2,
)
def test_windows(arguments, ends):
    """A window ends after ``window`` optimizer steps, whatever the epochs, and that is when it is logged."""
    options = {"max_steps": 30, "limit_train_batches": 7, "logger": CSVLogger("logs"), "log_every_n_steps": 9}
    run = trainer(RunReport(), OsciReset(**arguments), **options)
    run.fit(Row())
    found = logged(run)
    history = json.loads(Path(run.log_dir, "run.json").read_text())["history"]
    assert [step for step, _ in history.get("reset/fprop_w/layer", [])] == ends
    assert [step + 1 for step in found] == ends, "Lightning numbers the first step 0"
    assert all(set(row) == {"reset/fprop_w/layer"} for row in found.values())
    if ends:
        if ends[0] == 4:
            assert next(iter(found.values())) == {"reset/fprop_w/layer": 2 / 8}
        assert run.callback_metrics["reset/fprop_w/layer"] == list(found.values())[-1]["reset/fprop_w/layer"]


def test_accumulated_gradients():
    """Windows are counted in optimizer steps, and weights change in no other batch."""
    options = {"accumulate_grad_batches": 3, "max_steps": 11, "logger": CSVLogger("logs")}
    run = trainer(OsciReset(window=4, every=6), watch := Watch(), **options)
    run.fit(Row())
    assert len(watch.weights) == 33
    assert reset_at(watch.weights, accumulate=3) == {4: TREMBLE}
    assert logged(run) == {3: {"reset/fprop_w/layer": 2 / 8}, 9: {"reset/fprop_w/layer": 0.0}}, "set once, it is quiet"


def test_only_optimizer_steps_of_a_window_cost_something():
    batches = []

    class Noted(OsciReset):
        def _latent(self, run):
            batches.append(run.fit_loop.epoch_loop.batch_idx)
            return super()._latent(run)

    trainer(Noted(window=2, every=4), accumulate_grad_batches=3, max_steps=5).fit(Row())
    assert batches == [0, 2, 5, 12, 14], "once where a window opens, and once where the optimizer steps within it"


def test_several_optimizers():
    class Manual(Row):
        """The second optimizer steps in every second batch."""

        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.other = nn.Linear(2, 2)

        def training_step(self, batch, batch_idx):
            one, other = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx)["loss"])
            one.step()
            if batch_idx % 2:
                other.step()

        def configure_optimizers(self):
            return [Scripted([self.layer.weight], WEIGHT), torch.optim.SGD(self.other.parameters(), lr=0.0)]

    weights = fit(OsciReset(window=9, every=30, threshold=12), model=Manual(), max_steps=12, limit_train_batches=8)
    assert reset_at(weights) == {6: TREMBLE}, "nine optimizer steps are six batches"


@each("off", [lambda plugin: plugin.set_phase("bf16"), lambda plugin: plugin.set_blend(0.0)], fast=1)
def test_weights_that_are_not_quantized(off):
    def switch(trainer, pl_module, batch, batch_idx):
        """Off for one step within the first window."""
        trainer.precision_plugin.set_phase("fqt")
        trainer.precision_plugin.set_blend(1.0)
        if batch_idx == 5:
            off(trainer.precision_plugin)

    run = trainer(
        On(on_train_batch_start=switch), OsciReset(window=8, every=10), max_steps=20, logger=CSVLogger("logs")
    )
    run.fit(Row())
    assert [step + 1 for step in logged(run)] == [18]


def test_no_memory_between_windows():
    reset, held = OsciReset(window=4, every=10), []
    look = On(on_train_batch_start=lambda *_: held.append(len(reset._paths)))
    trainer(reset, look, max_steps=12).fit(Row())
    assert held == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
