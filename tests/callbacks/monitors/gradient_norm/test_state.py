"""State, refusals and the report of the gradient norm monitor."""

import json
from pathlib import Path

import pytest

from lightning_lowbit import GradientNormMonitor, RunReport
from tests.callbacks.monitors.gradient_norm.runs import SAID, Constant, logged, trainer
from tests.callbacks.monitors.resumed import resume
from tests.lightning_imports import Callback


def test_a_resumed_run_is_the_uninterrupted_one():
    """Stopped after a spike, between two logged steps, and before another."""

    def fit(monitor, how, **kwargs):
        run = trainer(monitor, log_every_n_steps=3, **kwargs)
        run.fit(Constant({12: 6.0, 16: 7.0, 17: 1.5}), **how)
        return run

    warning = SAID.format(13, 6, 1)
    whole, half, rest = resume(lambda: GradientNormMonitor(["layer"], every_n_steps=1), fit, (18, 14), warning, logged)
    assert sorted(whole) == [3, 6, 9, 12, 15, 18]
    assert whole == half | rest


def test_a_checkpoint_knows_of_the_step_that_has_just_been_done():
    monitor, saved = GradientNormMonitor(), []

    class Save(Callback):
        def on_train_batch_end(self, run, *_):
            if run.global_step == 13:
                saved.append(monitor.state_dict())

    with pytest.warns(UserWarning, match=SAID.format(13, 6, 1)):
        trainer(monitor, Save(), max_steps=14).fit(Constant({12: 6.0}))
    assert [step for step, *_ in saved[0]["spikes"]] == [13]
    assert saved[0]["alerts"], "the checkpoint does not know what was said"


def test_reported():
    monitor = GradientNormMonitor(["layer"], limit=10)
    with pytest.warns(UserWarning, match="Gradient norm"):
        run = trainer(RunReport(), monitor, max_steps=16)
        run.fit(Constant({12: 6.0, 14: 12.0}))
    (table,) = monitor.report_sections(run)[0].blocks
    assert [row[0] for row in table.rows] == [13, 15]
    listed = monitor.report_alerts(run)
    assert [text.split(":")[0] for text in listed] == ["Gradient norm, step 13", "Gradient norm, step 15"]
    page = Path("report.html").read_text()
    assert "Gradient norm" in page
    assert "above the limit of 10" in page
    found = json.loads(Path("run.json").read_text())["summary"]["gradient_norm"]
    assert [spike["step"] for spike in found["spikes"]] == [13, 15]
    assert found["alerts"] == listed
