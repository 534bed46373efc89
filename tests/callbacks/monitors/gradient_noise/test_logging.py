"""When the ratio is logged, and what is said of it."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_lowbit import Cast, GradientNoiseMonitor, LinearCasts, LossScaleMonitor, PrecisionSwitch, RunReport
from lightning_lowbit.report.html import Text
from tests.callbacks.monitors.device_reads import counted
from tests.callbacks.monitors.gradient_noise.runs import METRIC, NEAREST, NOISY, Model, fit, logged, ratios, trainer
from tests.lightning_imports import Callback, TensorBoardLogger


@pytest.mark.parametrize(
    ("every", "log_every", "micro", "expected"),
    [
        (2, 2, 1, {2: 2, 4: 4, 6: 6, 8: 8}),
        (2, 3, 1, {3: 2, 6: 6, 9: 8}),
        (3, 2, 2, {4: 3, 6: 6}),
        (4, 1, 1, {4: 4, 8: 8}),
        (1, 4, 1, {4: 4, 8: 8}),
    ],
)
def test_logged_in_the_step_or_in_the_next_one_that_is_logged(every, log_every, micro, expected):
    """By step in which it is logged, the step that was measured."""
    monitor = GradientNoiseMonitor(every, layers=[r"net\.2"])
    kwargs = {"log_every_n_steps": log_every, "accumulate_grad_batches": micro, "max_steps": 9 if log_every == 3 else 8}
    run = fit(Model(0.1, 5), monitor, logger=TensorBoardLogger("."), **kwargs)
    found = logged(run)
    known = dict(monitor.measurements())
    assert set(found) - {"epoch"} == {METRIC, f"{METRIC}/net.2"}
    assert found[METRIC] == pytest.approx({step: known[measured] for step, measured in expected.items()})
    assert found[f"{METRIC}/net.2"].keys() == expected.keys()


def test_infinity_is_logged():
    run = fit(Model(), GradientNoiseMonitor(3), NEAREST, logger=TensorBoardLogger("."))
    assert logged(run)[METRIC] == {3: math.inf, 6: math.inf}


@pytest.mark.parametrize("kind", ["draws", "layers"])
def test_read_once_after_each_measurement(kind, monkeypatch):
    hooks = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")
    monkeypatch.setattr("tests.callbacks.monitors.device_reads.HOOKS", hooks)
    Watched, reads = counted(GradientNoiseMonitor, monkeypatch)
    monitor = Watched(3, kind)
    steps = []

    class Look(Callback):
        def on_train_batch_start(self, run, *_):
            steps.append((run.global_step, [step for step, _ in monitor.measurements(METRIC)]))

    # Without a scale of the whole tensor, whose numbers emulated GEMMs read on the CPU.
    mx = Cast("e2m1", {"block": 32, "format": "e8m0"}, "stochastic")
    trainer(LinearCasts(wgrad_g=mx), monitor, Look(), max_steps=8, log_every_n_steps=5).fit(Model())
    assert all(reads.pop((hook, -1)) == 8 for hook in hooks), "a hook was not watched"
    assert +reads == {("on_train_batch_start", 3): 1, ("on_train_batch_start", 6): 1}
    assert steps[3:] == [(3, [3]), (4, [3]), (5, [3]), (6, [3, 6]), (7, [3, 6])]


def test_a_warning_is_said_once():
    monitor = GradientNoiseMonitor(1, threshold=1e6)
    with pytest.warns(UserWarning, match="GradientNoiseMonitor: the gradient, step 1: it is .* below 1e") as said:
        fit(Model(), monitor)
    assert sum("the gradient, step" in str(one.message) for one in said) == 1
    assert "PrecisionSwitch('qaf', below={})" in monitor._alerts.texts[0]


@pytest.mark.parametrize("kind", ["draws", "layers"])
def test_a_switch_follows(kind):
    monitor = GradientNoiseMonitor(1, kind, threshold=1e-3)
    run = trainer(NOISY, PrecisionSwitch("bf16", below={"threshold": 1e6, "measurements": 2}), monitor)
    run.fit(Model())
    steps = [step for step, _ in monitor.measurements()]
    assert run.precision_plugin.phase == "bf16"
    assert 2 <= len(steps) < 6


def test_other_metrics():
    monitor = GradientNoiseMonitor()
    assert monitor.measurements(METRIC) == []
    with pytest.raises(KeyError, match="gradient_noise/ratio"):
        monitor.measurements("gradient_noise")


def test_reported():
    monitor = GradientNoiseMonitor(2)
    run = trainer(NOISY, RunReport(), monitor)
    run.fit(Model(0.1))
    chart, text = monitor.report_sections(run)[0].blocks
    assert chart.series["ratio"] == ([2, 4, 6], ratios(monitor))
    assert chart.series["threshold"] == ([2, 4, 6], [math.sqrt(3)] * 3)
    assert "Gradient noise" in Path("report.html").read_text()
    found = json.loads(Path("run.json").read_text())["summary"]["gradient_noise"]
    assert found["ratios"] == [{"step": step, "ratio": ratio} for step, ratio in monitor.measurements()]


def test_reported_without_noise_or_measurements():
    monitor = GradientNoiseMonitor(2)
    run = trainer(NEAREST, RunReport(), monitor)
    run.fit(Model())
    (text,) = monitor.report_sections(run)[0].blocks
    assert text == Text("Both draws of the gradient were always the same: nothing was rounded stochastically.")
    assert "Gradient noise" in Path("report.html").read_text()
    (text,) = GradientNoiseMonitor(7).report_sections(run)[0].blocks
    assert text == Text("Not measured: every 7 steps, in quantized layers.")


class Broken(Tensor):
    """Cannot be read."""

    error: RuntimeError

    def tolist(self):
        raise self.error


@pytest.mark.parametrize("error", ["CUDA error: an illegal memory access", "HIP error: invalid", "of the accelerator"])
def test_nothing_is_read_after_an_error_of_the_device(error, monkeypatch):
    kind = torch.AcceleratorError if "accelerator" in error else RuntimeError
    monkeypatch.setattr(Broken, "error", kind(error), raising=False)
    monitor = GradientNoiseMonitor()
    monitor._keep(3, {"ratio": torch.ones(()).as_subclass(Broken)})
    monitor._read()
    assert monitor.measurements() == []
    assert monitor._unread == []


def test_other_errors_are_raised(monkeypatch):
    monkeypatch.setattr(Broken, "error", RuntimeError("a bug"), raising=False)
    monitor = GradientNoiseMonitor()
    monitor._keep(3, {"ratio": torch.ones(()).as_subclass(Broken)})
    with pytest.raises(RuntimeError, match="a bug"):
        monitor._read()
    monitor._keep(4, {"ratio": torch.tensor(5.0)})
    monitor._read()
    assert monitor.measurements() == [(4, 5.0)]


@pytest.mark.parametrize("error", ["CUDA error", "a bug"])
def test_a_report_of_the_loss_scale_after_an_error(error, monkeypatch):
    monkeypatch.setattr(Broken, "error", RuntimeError(error), raising=False)
    monitor = LossScaleMonitor()
    monitor._counts = monitor._counts.as_subclass(Broken)
    if error == "a bug":
        with pytest.raises(RuntimeError, match="a bug"):
            monitor.report_sections(trainer(NOISY))
    else:
        (section,) = monitor.report_sections(trainer(NOISY))
        assert section.blocks == [Text("Lost in an error of the device.")]
