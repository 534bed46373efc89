"""Alerts and report of the quantization monitor."""

import json
import math
import warnings
from contextlib import contextmanager

import pytest
import torch

from lightning_lowbit import LowBitPrecision, PrecisionSwitch, RunReport, TernaryPrecision
from lightning_lowbit.callbacks.monitors.quantization import QuantizationMonitor
from tests.callbacks.monitors.quantization.runs import ALL, LAYERS, AtStep, Two, rows, trainer, zeros


@contextmanager
def alerts_said():
    """What the monitor warns of within this context, without its name."""
    texts = []
    with warnings.catch_warnings(record=True, action="always") as said:
        yield texts
    prefix = "QuantizationMonitor: "
    texts += [str(warning.message).removeprefix(prefix) for warning in said if str(warning.message).startswith(prefix)]


def still(fill=None):
    """A model that does not learn, the first layer's weight filled in some way."""
    model = Two(lr=0.0)
    if fill is not None:
        with torch.no_grad():
            fill(model.layer[0].weight)
    return model


def alerts(monitor, run):
    return monitor.report_data(run)["quantized_weights"]["alerts"]


def heavy_tailed(weight):
    """One row of 32 is large: 31 of 32 elements become 0."""
    weight.fill_(0.01)
    weight[0] = 10.0


def test_a_healthy_run_has_no_alerts():
    """Warnings are errors."""
    for plugin in (
        TernaryPrecision(quantize_output=True),
        TernaryPrecision(scale_factor=2 / math.sqrt(3), quantize_output=True),
        LowBitPrecision("int2"),
    ):
        monitor = QuantizationMonitor(no_flips_for=2)
        run = trainer(monitor, plugin=plugin, log_every_n_steps=1)
        run.fit(Two())
        assert alerts(monitor, run) == []


def test_all_codes_are_zero():
    monitor = QuantizationMonitor()
    run = trainer(monitor, log_every_n_steps=1)
    with alerts_said() as said:
        run.fit(still(zeros))
    (text,) = said  # once, of one layer, and not of a share of zeros that is not expected
    assert text.startswith("layer.0, step 1: all codes of its weight are 0, where some should be -1 or 1")
    assert "Look for what keeps the weight at 0" in text
    assert alerts(monitor, run) == said


def test_a_weight_that_is_not_finite():
    monitor = QuantizationMonitor()
    run = trainer(monitor, log_every_n_steps=1)
    with alerts_said() as said:
        run.fit(still(lambda weight: weight.fill_(math.nan)))
    text = next(text for text in said if "no element" in text)
    assert text.startswith("2 layers, the worst layer.0, step 1: no element of its weight is a number")
    assert not any("zeros" in text or "are 0" in text for text in said), "a share of zeros of what are no numbers"


def test_an_alert_of_the_last_step_is_said():
    with alerts_said() as said:
        trainer(QuantizationMonitor(), max_steps=2).fit(still(zeros))
    assert [text.partition(":")[0] for text in said] == ["layer.0, step 2"]


def test_a_share_of_zeros_that_is_not_expected():
    monitor = QuantizationMonitor()
    run = trainer(monitor, log_every_n_steps=1, plugin=TernaryPrecision(scale_factor=0.866, quantize_output=True))
    with alerts_said() as said:
        run.fit(still(heavy_tailed))
    (text,) = said
    assert text.startswith("layer.0, step 1: 96.9% of its weight are 0, where 27.0% are expected")
    assert "a factor of 0.866 (zeros_tolerance=0.15)" in text
    assert alerts(monitor, run) == said


@pytest.mark.parametrize(("plugin", "tolerance"), [(TernaryPrecision, 0.9), (lambda: LowBitPrecision("int2"), 0.15)])
def test_a_share_of_zeros_that_is_tolerated(plugin, tolerance):
    """Of weights whose scale is not made of their mean nothing is expected: here none is 0."""
    monitor = QuantizationMonitor(zeros_tolerance=tolerance)
    run = trainer(monitor, log_every_n_steps=1, plugin=plugin())
    run.fit(still(heavy_tailed))
    assert alerts(monitor, run) == []


def test_no_flips():
    """Counted from the first look, in optimizer steps, for each layer; of a frozen layer nothing is expected."""
    monitor = QuantizationMonitor(no_flips_for=3)
    run = trainer(monitor, log_every_n_steps=2, accumulate_grad_batches=2, max_steps=8)
    model = still()
    model.layer[2].requires_grad_(False)
    with alerts_said() as said:
        run.fit(model)
    (text,) = said
    assert text.startswith("layer.0, step 6: no code of its weight has changed in a logged step for 4 optimizer steps")
    assert "(no_flips_for=3). Look at its gradient and learning rate" in text
    assert alerts(monitor, run) == said


def test_a_flip_begins_the_count_anew():
    def step(lr):
        return lambda run: run.optimizers[0].param_groups[0].update(lr=lr)

    monitor = QuantizationMonitor(no_flips_for=3)
    run = trainer(AtStep(3, step(0.5)), AtStep(4, step(0.0)), monitor, log_every_n_steps=1)
    run.fit(still())
    assert alerts(monitor, run) == [], "two steps from the fourth, in which codes flip, to the sixth"


@pytest.mark.parametrize("operands", [True, False])
def test_steps_that_were_not_seen_do_not_count(operands):
    def phase(name):
        return lambda run: run.precision_plugin.set_phase(name)

    monitor = QuantizationMonitor(no_flips_for=3, operands=operands)
    run = trainer(AtStep(2, phase("bf16")), AtStep(4, phase("fqt")), monitor, log_every_n_steps=1, max_steps=7)
    run.fit(still())
    assert alerts(monitor, run) == []
    assert monitor.report_data(run)["quantized_weights"]["step"] == 7


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
    assert set(alerts(monitor, run)) == {*first, *second}, "what was said before the checkpoint belongs to the report"


def test_the_last_step_is_reported():
    monitor = QuantizationMonitor()
    run = trainer(monitor)
    assert monitor.report_data(run)["quantized_weights"] == {"step": 0, "layers": {}, "alerts": []}
    (section,) = monitor.report_sections(run)
    assert section.blocks[0].text == "No step with quantized weights was logged."
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
    monitor = QuantizationMonitor()
    run = trainer(PrecisionSwitch("bf16", step=4), monitor)
    run.fit(Two())
    assert list(rows(run)) == [1, 3]
    assert monitor.report_data(run)["quantized_weights"]["step"] == 4
