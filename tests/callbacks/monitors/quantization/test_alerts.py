"""Alerts and report of the quantization monitor."""

import json
import math
import re
from functools import partial

import pytest
import torch

from lightning_lowbit import LowBitPrecision, PrecisionSwitch, RunReport, TernaryPrecision
from lightning_lowbit.callbacks.monitors.quantization import QuantizationMonitor
from lightning_lowbit.nn import OPERANDS
from tests.callbacks.monitors.quantization.runs import (
    LAYERS,
    MEANS,
    NAMES,
    TERNARY,
    WEIGHTS,
    AtStep,
    Two,
    logged,
    of_layers,
    rows,
)
from tests.callbacks.monitors.quantization.runs import ternary_trainer as trainer
from tests.callbacks.monitors.said import alerts_said
from tests.tables import each


def still(fill=None):
    """A model that does not learn, the first layer's weight filled in some way."""
    model = Two(lr=0.0)
    if fill is not None:
        with torch.no_grad():
            fill(model.layer[0].weight)
    return model


def zeros(weight):
    weight.zero_()


def heavy_tailed(weight):
    """One row of 48 is large: 47 of 48 elements become 0."""
    weight.fill_(0.01)
    weight[0] = 10.0


def said_in(model, *callbacks, plugin=TERNARY, steps=6, every=1, accumulate=1, **kwargs):
    """What is said in a run, and that is what the report has."""
    monitor = QuantizationMonitor(**kwargs)
    options = {"max_steps": steps, "log_every_n_steps": every, "accumulate_grad_batches": accumulate}
    run = trainer(*callbacks, monitor, plugin=plugin(), **options)
    with alerts_said() as said:
        run.fit(model)
    data = monitor.report_data(run)["quantized_weights"]
    assert (data["alerts"], data["step"]) == (said, steps)
    return said


LOW = partial(TernaryPrecision, scale_factor=0.866, quantize_output=True)
HIGH = partial(TernaryPrecision, scale_factor=2 / math.sqrt(3), quantize_output=True)
INT2 = partial(LowBitPrecision, "int2")


@each("fill, options, words", [
    # Once, of one layer, and not of a share of zeros that is not expected.
    (zeros, {}, "step 1: all codes of its weight are 0, where some should be -1 or 1.*Look for what keeps the weight "),
    (zeros, {"steps": 2, "every": 2}, "step 2: all codes"),  # in the last step
    (heavy_tailed, {"plugin": LOW}, "step 1: 97.9% of its weight are 0, where 27.0% are expected.*a factor of 0.866 "
     r"\(zeros_tolerance=0.15\)"),
    (heavy_tailed, {"plugin": TernaryPrecision, "zeros_tolerance": 0.9}, None),
    # Counted from the first look, in optimizer steps, for each layer; of a frozen layer nothing is expected.
    (None, {"no_flips_for": 3, "steps": 8, "every": 2, "accumulate": 2}, "step 6: no code of its weight has changed in "
     r"a logged step for 4 optimizer steps \(no_flips_for=3\). Look at its gradient and learning rate"),
    (heavy_tailed, {"plugin": INT2}, None),  # its scale is not made of the mean: nothing is expected, and none is 0
], fast=2)  # fmt: skip
def test_what_is_said_of_a_weight(fill, options, words):
    model = still(fill)
    model.layer[2].requires_grad_(fill is not None)
    said = said_in(model, **options)
    assert len(said) == (words is not None)
    assert not said or re.match(f"layer.0, {words}", said[0]), said


@each("plugin", [TERNARY, HIGH, INT2], fast=1)
def test_a_healthy_run_has_no_alerts(plugin):
    assert said_in(Two(), plugin=plugin, no_flips_for=2) == []


def act(batch, action, *arguments):
    return AtStep(batch, lambda run: action(run, *arguments))


@pytest.mark.slow
def test_a_flip_begins_the_count_anew():
    """Two steps from the fourth, in which codes flip, to the sixth."""

    def learn(run, lr):
        run.optimizers[0].param_groups[0].update(lr=lr)

    assert said_in(still(), act(3, learn, 0.05), act(4, learn, 0.0), no_flips_for=3) == []


@each("operands", [True, False], fast=1)
def test_steps_that_were_not_seen_do_not_count(operands):
    def switch(run, phase):
        run.precision_plugin.set_phase(phase)

    switches = act(2, switch, "bf16"), act(4, switch, "fqt")
    assert said_in(still(), *switches, steps=7, no_flips_for=3, operands=operands) == []


@pytest.mark.slow
def test_steps_of_a_frozen_weight_do_not_count():
    def thaw(run):
        run.lightning_module.layer[0].requires_grad_(True)

    model = still()
    model.layer[0].requires_grad_(False)
    assert said_in(model, act(4, thaw), no_flips_for=3, only=["layer.0"]) == []


@pytest.mark.slow
def test_a_weight_that_is_not_finite():
    said = said_in(still(lambda weight: weight.fill_(math.nan)))
    text = next(text for text in said if "no element" in text)
    assert text.startswith("2 layers, the worst layer.0, step 1: no element of its weight is a number")
    assert not any("zeros" in text or "are 0" in text for text in said), "a share of zeros of what are no numbers"


def outlier(batch):
    """All but one element of the input are so small beside it that int4 makes zeros of them."""
    batch = torch.full_like(batch, 1e-3)
    batch[:, 0] = 1.0
    return batch


class Spoilt(Two):
    """Some batches are spoilt; weights stay as they are."""

    def __init__(self, spoil, since=2):
        super().__init__()
        self.spoil, self.since = spoil, since

    def training_step(self, batch, batch_idx):
        return super().training_step(self.spoil(batch) if batch_idx >= self.since else batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.zero_grad()


INT4 = partial(LowBitPrecision, "int4")


def test_underflow_is_said_once():
    (text,) = said_in(Spoilt(outlier), plugin=INT4)
    assert text.startswith("layer.0, step 3: 96.9% of the elements of fprop_x that are not 0 became 0")
    assert "(underflow_limit=0.5): few large elements take the range from the others. Smaller blocks, stoch" in text


@each("plugin, limit", [(INT4, 0.97), (partial(LowBitPrecision, "ternary"), 1e-3)], fast=1)
def test_underflow_that_is_tolerated(plugin, limit):
    """Zeros are levels of ternary weights."""
    spoil = outlier if plugin is INT4 else torch.ones_like
    said = said_in(Spoilt(spoil, since=0), plugin=plugin, underflow_limit=limit, steps=4, every=2)
    assert not any("underflow" in text or "fprop_w" in text for text in said)


def test_what_is_not_finite_is_said_once():
    def spoil(batch):
        batch = batch.clone()
        batch[3, 4] = math.nan
        return batch

    run = trainer(QuantizationMonitor(weights=False), plugin="nvfp4", log_every_n_steps=1)
    with alerts_said() as texts:
        run.fit(Spoilt(spoil))
    assert len(texts) == len(set(texts)) > 0
    assert "layer.0, step 3: fprop_x holds a NaN or an infinity. Look at the data of this step" in texts[0]
    assert not any("fprop_w" in text or "became 0" in text for text in texts)
    assert math.isnan(of_layers(logged(run)[2])["layer.0", "fprop_x"]["sqnr"])


@each("operands, weights", [(True, None), (True, False), (False, True), (False, None)], fast=2)
def test_operands_or_weights(operands, weights):
    monitor = QuantizationMonitor(only=[r"layer\.2"], operands=operands, weights=weights)
    run = trainer(monitor, plugin="nvfp4", log_every_n_steps=6)
    run.fit(Two())
    of_operands = {f"{name}/{operand}/layer.2" for name in NAMES for operand in OPERANDS}
    of_operands |= {f"{name}/{operand}" for name in MEANS for operand in OPERANDS}
    of_weights = {f"{name}/fprop_w/layer.2" for name in ("flips", "distance")}
    expected = (of_operands if operands else set()) | (of_weights if weights is not False else set())
    assert set(logged(run, NAMES | WEIGHTS)[5]) == expected


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_resumed_run_goes_on_counting_and_does_not_repeat_itself(tmp_path):
    def fit(steps, **kwargs):
        monitor = QuantizationMonitor(no_flips_for=4)
        run = trainer(monitor, max_steps=steps, log_every_n_steps=1, limit_train_batches=10)
        run.fit(still(zeros), **kwargs)
        run.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return monitor, run

    with alerts_said() as first:
        fit(3)
    with alerts_said() as second:
        monitor, run = fit(6, ckpt_path=tmp_path / "3.ckpt", weights_only=True)
    assert [text.partition(":")[0] for text in first] == ["layer.0, step 1"]
    assert [text.partition(":")[0] for text in second] == ["2 layers, the worst layer.0, step 5"]
    assert "no code of its weight has changed in a logged step for 4 optimizer steps" in second[0]
    assert monitor.report_alerts(run) == first + second, "what was said before the checkpoint belongs to the report"


def test_the_last_step_is_reported():
    monitor = QuantizationMonitor()
    run = trainer(monitor)
    assert monitor.report_data(run)["quantized_weights"] == {"step": 0, "layers": {}, "alerts": []}
    run.fit(Two())
    data = monitor.report_data(run)["quantized_weights"]
    (_, _, row) = rows(run).values()
    assert data["step"] == 6
    for layer in LAYERS:
        expected = {name: row[f"{name}/fprop_w/{layer}"] for name in WEIGHTS}
        assert data["layers"][layer] == pytest.approx(expected, rel=1e-6)
    operands, section = monitor.report_sections(run)
    assert (operands.title, section.title) == ("Quantized operands", "Quantized weights")
    (table,) = section.blocks
    assert list(table.header) == ["layer", "minus", "zeros", "plus", "flips", "distance", "alerts"]
    assert [line[0] for line in table.rows] == list(LAYERS)
    assert [float(cell) for cell in table.rows[0][1:4]] == pytest.approx(
        [row[f"{name}/fprop_w/layer.0"] for name in ("minus", "zeros", "plus")], rel=5e-3
    )
    assert "At step 6" in table.caption


def test_reported_after_an_exception(tmp_path):
    class Breaks(Two):
        def on_before_optimizer_step(self, optimizer):
            if self.trainer.global_step == 2:
                raise KeyError("broken")

    model = Breaks(lr=0.0)
    heavy_tailed(model.layer[0].weight.data)
    monitor = QuantizationMonitor()
    run = trainer(RunReport(), monitor, log_every_n_steps=1)
    with alerts_said() as said, pytest.raises(KeyError, match="broken"):
        run.fit(model)
    assert len(said) == 1
    assert monitor._before == {}, "codes are kept"
    (path,) = tmp_path.rglob("run.json")
    weights = json.loads(path.read_text())["summary"]["quantized_weights"]
    assert weights["step"] == 2
    assert set(weights["layers"]["layer.2"]) == WEIGHTS
    assert len(weights["alerts"]) == 1
    (page,) = tmp_path.rglob("report.html")
    assert "Quantized weights" in page.read_text()


def test_a_switch_before_the_numbers_are_read():
    """The report shows the last step that had some."""
    monitor = QuantizationMonitor()
    run = trainer(PrecisionSwitch("bf16", step=4), monitor)
    run.fit(Two())
    assert list(rows(run)) == [1, 3]
    assert {data["step"] for data in monitor.report_data(run).values()} == {4}
    assert [section.title for section in monitor.report_sections(run)] == ["Quantized operands", "Quantized weights"]
