"""Alerts and report of the quantization monitor."""

import json
import math
import re
from functools import partial

import pytest
import torch

from lightning_lowbit import LowBitPrecision, PrecisionSwitch, RunReport, TernaryPrecision
from lightning_lowbit.callbacks.monitors.quantization import QuantizationMonitor
from tests.callbacks.monitors.quantization.runs import ALL, LAYERS, TERNARY, AtStep, Two, rows, trainer, zeros
from tests.callbacks.monitors.said import alerts_said
from tests.tables import each


def still(fill=None):
    """A model that does not learn, the first layer's weight filled in some way."""
    model = Two(lr=0.0)
    if fill is not None:
        with torch.no_grad():
            fill(model.layer[0].weight)
    return model


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
    (heavy_tailed, {"plugin": INT2}, None),  # its scale is not made of the mean: nothing is expected, and none is 0
    # Counted from the first look, in optimizer steps, for each layer; of a frozen layer nothing is expected.
    (None, {"no_flips_for": 3, "steps": 8, "every": 2, "accumulate": 2}, "step 6: no code of its weight has changed in "
     r"a logged step for 4 optimizer steps \(no_flips_for=3\). Look at its gradient and learning rate"),
])  # fmt: skip
def test_what_is_said_of_a_weight(fill, options, words):
    model = still(fill)
    model.layer[2].requires_grad_(fill is not None)
    said = said_in(model, **options)
    assert len(said) == (words is not None)
    assert not said or re.match(f"layer.0, {words}", said[0]), said


def test_a_healthy_run_has_no_alerts():
    for plugin in (TERNARY, HIGH, INT2):
        assert said_in(Two(), plugin=plugin, no_flips_for=2) == []


def act(batch, action, *arguments):
    return AtStep(batch, lambda run: action(run, *arguments))


def test_a_flip_begins_the_count_anew():
    """Two steps from the fourth, in which codes flip, to the sixth."""

    def learn(run, lr):
        run.optimizers[0].param_groups[0].update(lr=lr)

    assert said_in(still(), act(3, learn, 0.05), act(4, learn, 0.0), no_flips_for=3) == []


@each("operands", [True, False])
def test_steps_that_were_not_seen_do_not_count(operands):
    def switch(run, phase):
        run.precision_plugin.set_phase(phase)

    switches = act(2, switch, "bf16"), act(4, switch, "fqt")
    assert said_in(still(), *switches, steps=7, no_flips_for=3, operands=operands) == []


def test_a_weight_that_is_not_finite():
    said = said_in(still(lambda weight: weight.fill_(math.nan)))
    text = next(text for text in said if "no element" in text)
    assert text.startswith("2 layers, the worst layer.0, step 1: no element of its weight is a number")
    assert not any("zeros" in text or "are 0" in text for text in said), "a share of zeros of what are no numbers"


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
        expected = {name: row[f"{name}/fprop_w/{layer}"] for name in ALL}
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
    assert set(weights["layers"]["layer.2"]) == ALL
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
