"""What is said of rollbacks, and what is refused."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_lowbit import RunReport
from tests.callbacks.recovery.spike_rollback.runs import BAD, Scripted, fit, rollback, trainer
from tests.lightning_imports import (
    TensorBoardLogger,
)


def test_logged():
    run = trainer(rollback(), logger=TensorBoardLogger("."))
    with pytest.warns(UserWarning, match="SpikeRollback"):
        run.fit(model := Scripted(range(20), {BAD: "nan"}))
    run.logger.finalize("success")
    events = EventAccumulator(run.logger.log_dir).Reload()
    found = {
        name: {event.step: event.value for event in events.Scalars(f"spike_rollback/{name}")}
        for name in ("rollbacks", "mean", "limit")
    }
    assert found["rollbacks"] == {step: float(step >= 13) for step in range(20)}
    assert list(found["mean"]) == list(range(5, 20)), "after four good losses, the last of which is read in step 5"
    for step in (5, 12, 13):
        good = torch.tensor(model.losses[: min(step - 1, 11)], dtype=torch.float64)
        mean, limit = float(good.mean()), float(good.mean() + 6 * good.std(correction=0))
        assert found["mean"][step] == pytest.approx(mean, rel=1e-6)
        assert found["limit"][step] == pytest.approx(limit, rel=1e-6)


def test_reported():
    with pytest.warns(UserWarning, match="SpikeRollback"):
        fit(Scripted(range(20), {BAD: "nan"}), RunReport(), rollback())
    page = Path("report.html").read_text()
    assert "Spikes" in page
    assert "Rollbacks: 1." in page
    assert f'<td class="number">{BAD + 1}</td>' in page, "charts count the first step as 1"
    fit(Scripted(range(4)), RunReport(), rollback())
    assert "No loss spiked." in Path("version_1/report.html").read_text()
