"""When the ratio is logged, what is said and reported of it, and what checkpoints hold."""

import math

import pytest
import torch
from torch import Tensor

from lightning_lowbit import Cast, GradientNoiseMonitor, LinearCasts, LossScaleMonitor, PrecisionSwitch
from lightning_lowbit.report.html import Text
from tests.callbacks.monitors.device_reads import counted
from tests.callbacks.monitors.gradient_noise.runs import (
    METRIC,
    NEAREST,
    NOISY,
    Model,
    fit,
    logged,
    ratios,
    steps,
    trainer,
)
from tests.lightning_imports import Callback, MisconfigurationException, TensorBoardLogger
from tests.tables import each


@each(
    "every, log_every, micro, expected",
    [
        (2, 2, 1, {2: 2, 4: 4, 6: 6, 8: 8}),
        (2, 3, 1, {3: 2, 6: 6, 9: 8}),
        (3, 2, 2, {4: 3, 6: 6}),
        (4, 1, 1, {4: 4, 8: 8}),
        (1, 4, 1, {4: 4, 8: 8}),
    ],
    fast=2,
)
def test_logged_in_the_step_or_in_the_next_one_that_is_logged(every, log_every, micro, expected):
    """By step in which it is logged, the step that was measured."""
    monitor = GradientNoiseMonitor(every, layers=[r"net\.2"])
    kwargs = {"log_every_n_steps": log_every, "accumulate_grad_batches": micro, "max_steps": 9 if log_every == 3 else 8}
    run = fit(Model(0.1, 5), monitor, logger=TensorBoardLogger("."), **kwargs)
    measured = dict(monitor.measurements())
    assert logged(run) == pytest.approx({step: measured[at] for step, at in expected.items()})
    assert logged(run, f"{METRIC}/net.2").keys() == expected.keys()
    assert set(run.callback_metrics) == {METRIC, f"{METRIC}/net.2"}


@each("kind", ["draws", "layers"], fast=1)
def test_read_once_after_each_measurement(kind, monkeypatch):
    hooks = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")
    Watched, reads = counted(GradientNoiseMonitor, monkeypatch, hooks)
    monitor, known = Watched(3, kind), []

    class Look(Callback):
        def on_train_batch_start(self, run, *_):
            known.append((run.global_step, steps(monitor)))

    # Without a scale of the whole tensor, whose numbers emulated GEMMs read on the CPU.
    mx = Cast("e2m1", {"block": 32, "format": "e8m0"}, "stochastic")
    trainer(LinearCasts(wgrad_g=mx), monitor, Look(), max_steps=8, log_every_n_steps=5).fit(Model())
    assert all(reads.pop((hook, -1)) == 8 for hook in hooks), "a hook was not watched"
    assert +reads == {("on_train_batch_start", 3): 1, ("on_train_batch_start", 6): 1}
    assert known[3:] == [(3, [3]), (4, [3]), (5, [3]), (6, [3, 6]), (7, [3, 6])]


def test_a_warning_is_said_once():
    monitor = GradientNoiseMonitor(1, threshold=1e6)
    with pytest.warns(UserWarning, match="GradientNoiseMonitor: the gradient, step 1: it is .* below 1e") as said:
        fit(Model(), monitor)
    assert sum("the gradient, step" in str(one.message) for one in said) == 1
    assert "PrecisionSwitch('qaf', below={})" in monitor._alerts.texts[0]
    with pytest.raises(KeyError, match="gradient_noise/ratio"):
        monitor.measurements("gradient_noise")


@each("kind", ["draws", "layers"], fast=1)
def test_a_switch_follows(kind):
    monitor = GradientNoiseMonitor(1, kind, threshold=1e-3)
    run = trainer(NOISY, PrecisionSwitch("bf16", below={"threshold": 1e6, "measurements": 2}), monitor)
    run.fit(Model())
    assert run.precision_plugin.phase == "bf16"
    assert 2 <= len(ratios(monitor)) < 6


def test_reported():
    monitor = GradientNoiseMonitor(2)
    run = fit(Model(0.1), monitor)
    chart, text = monitor.report_sections(run)[0].blocks
    lines = {"ratio": ([2, 4, 6], ratios(monitor)), "threshold": ([2, 4, 6], [math.sqrt(3)] * 3)}
    assert chart.series == lines
    data = monitor.report_data(run)["gradient_noise"]
    assert data["ratios"] == [{"step": step, "ratio": ratio} for step, ratio in monitor.measurements()]


def test_without_noise():
    monitor = GradientNoiseMonitor(3)
    run = fit(Model(), monitor, NEAREST, logger=TensorBoardLogger("."))
    assert logged(run) == {3: math.inf, 6: math.inf}
    (text,) = monitor.report_sections(run)[0].blocks
    assert text == Text("Both draws of the gradient were always the same: nothing was rounded stochastically.")


class Broken(Tensor):
    """Cannot be read."""

    error: RuntimeError

    def tolist(self):
        raise self.error


@each(
    "error, is_of_device",
    [
        (RuntimeError("CUDA error: an illegal memory access"), True),
        (RuntimeError("HIP error: invalid"), True),
        (torch.AcceleratorError("of the accelerator"), True),
        (RuntimeError("a bug"), False),
    ],
)
def test_nothing_is_read_after_an_error_of_the_device(error, is_of_device, monkeypatch):
    monkeypatch.setattr(Broken, "error", error, raising=False)
    monitor, scale = GradientNoiseMonitor(), LossScaleMonitor()
    monitor._keep(3, {"ratio": torch.ones(()).as_subclass(Broken)})
    scale._counts = scale._counts.as_subclass(Broken)
    if is_of_device:
        monitor._read()
        (section,) = scale.report_sections(trainer(NOISY))
        assert section.blocks == [Text("Lost in an error of the device.")]
    else:
        for read in (monitor._read, lambda: scale.report_sections(trainer(NOISY))):
            with pytest.raises(RuntimeError, match="a bug"):
                read()
    assert monitor._unread == [] == monitor.measurements()
    monitor._keep(4, {"ratio": torch.tensor(5.0)})
    monitor._read()
    assert monitor.measurements() == [(4, 5.0)]


def resumed(monitor, state):
    """A monitor with the state of another one, as if a run went on."""
    monitor.load_state_dict(state)
    monitor.setup = lambda *_, **__: None
    return monitor


def test_the_window_goes_on_with_the_same_casts_and_kind():
    """What was measured stays."""
    monitor = GradientNoiseMonitor(4, average=4)
    fit(Model(0.1, 5), monitor, max_steps=5, log_every_n_steps=6)
    assert (monitor.state_dict()["kind"], monitor.state_dict()["to_log"]) == ("draws", True)
    other = resumed(GradientNoiseMonitor(kind="layers"), monitor.state_dict())
    assert other.measurements() == monitor.measurements() != []
    assert (other.state_dict()["window"], other.state_dict()["to_log"]) == ([], False)
    fit(Model(0.1, 5), monitor := GradientNoiseMonitor(1, average=4))
    state = monitor.state_dict()
    for casts, length in ((NOISY, 2), (NEAREST, 1)):
        shorter = resumed(GradientNoiseMonitor(1, average=2, layers=[r"net\.0"]), state)
        assert shorter.state_dict()["window"] == state["window"][-2:]
        run = fit(Model(0.1, 5), shorter, casts, max_steps=1)
        assert set(run.callback_metrics) == {METRIC, f"{METRIC}/net.0"}
        assert len(shorter.measurements()) == 7
        assert len(shorter.state_dict()["window"]) == length
        assert (ratios(shorter)[-1] == math.inf) == (casts is NEAREST)


def test_a_switch_does_not_wait_for_what_is_not_measured():
    model = Model()
    model.automatic_optimization = False
    switch = PrecisionSwitch("qaf", below={})
    for callbacks in ([switch, GradientNoiseMonitor()], [GradientNoiseMonitor(), switch]):
        with (
            pytest.warns(UserWarning, match="Not measured"),
            pytest.raises(MisconfigurationException, match="Monitor does not .it measures nothing"),
        ):
            trainer(NOISY, *callbacks).fit(model)
