"""State of the gradient noise monitor: checkpoints, bad arguments, YAML."""

import math

import pytest

from lightning_lowbit import GradientNoiseMonitor, PrecisionSwitch
from tests.callbacks.monitors.gradient_noise.runs import METRIC, NEAREST, NOISY, Model, fit, logged, ratios, trainer
from tests.callbacks.monitors.resumed import resume
from tests.lightning_imports import MisconfigurationException


def test_a_resumed_run_is_the_uninterrupted_one():
    """Stopped between a measurement and the step that logs it."""

    def fit(monitor, how, **kwargs):
        run = trainer(NOISY, monitor, log_every_n_steps=3, **kwargs)
        run.fit(Model(0.1, 3), **how)
        return run

    def make():
        return GradientNoiseMonitor(5, average=3, threshold=1e6, layers=[r"net\.0"])

    whole, half, rest = resume(make, fit, (9, 5), "the gradient, step 5", logged)
    assert METRIC not in half
    assert whole[METRIC] == rest[METRIC]
    assert whole[METRIC].keys() == {6}


def test_the_window_goes_on():
    monitor = GradientNoiseMonitor(1, average=4)
    fit(Model(0.1, 5), monitor)
    shorter = GradientNoiseMonitor(1, average=2, layers=[r"net\.0"])
    shorter.load_state_dict(monitor.state_dict())
    assert [row["sums"] for row in shorter.state_dict()["window"]] == [
        row["sums"] for row in monitor.state_dict()["window"][-2:]
    ]
    run = trainer(NOISY, shorter, max_steps=1)
    shorter.setup = lambda *_, **__: None  # as if a run went on
    run.fit(Model(0.1, 5))
    assert set(run.callback_metrics) == {METRIC, f"{METRIC}/net.0"}
    assert len(shorter.measurements()) == 7


def test_sums_of_other_casts_are_not_averaged_with_after_a_resume():
    monitor = GradientNoiseMonitor(1)
    fit(Model(), monitor, max_steps=3)
    for casts, length in ((NOISY, 4), (NEAREST, 1)):
        other = GradientNoiseMonitor(1)
        other.load_state_dict(monitor.state_dict())
        other.setup = lambda *_, **__: None  # as if a run went on
        fit(Model(), other, casts, max_steps=1)
        assert len(other.state_dict()["window"]) == length
    assert ratios(other)[-1] == math.inf


def test_sums_of_another_kind_are_not_averaged_with():
    """What was measured stays."""
    monitor, other = GradientNoiseMonitor(4, log := "draws"), GradientNoiseMonitor(1, kind="layers")
    fit(Model(), monitor, max_steps=5, log_every_n_steps=6)
    state = monitor.state_dict()
    assert state["kind"] == log
    assert state["to_log"]
    other.load_state_dict(state)
    assert other.measurements() == monitor.measurements()
    assert other.state_dict()["window"] == []
    assert not other.state_dict()["to_log"]


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
