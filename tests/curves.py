"""What loggers wrote of a run."""

import csv
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def event_curves(run, selected="epoch".__ne__, first=1):
    """The event file, by optimizer step: Lightning numbers the first one 0, which is ``first`` here."""
    run.logger.finalize("success")
    events = EventAccumulator(run.logger.log_dir).Reload()
    curves = {}
    for name in filter(selected, events.Tags()["scalars"]):
        for event in events.Scalars(name):
            row = curves.setdefault(event.step + first, {})
            assert name not in row, f"{name} twice in step {event.step + first}"
            row[name] = event.value
    return curves


def csv_curves(run, selected):
    """The file of a `CSVLogger`, by the step it was logged at."""
    path = Path(run.logger.experiment.metrics_file_path)
    curves = {}
    for row in csv.DictReader(path.read_text().splitlines()) if path.exists() else ():
        values = {name: float(value) for name, value in row.items() if value and selected(name)}
        if values:
            curves.setdefault(int(row["step"]), {}).update(values)
    return curves


def assert_curves(curves, expected, rtol, atol=0.0):
    """The same steps, names and, within the tolerances, values; NaN equals NaN."""
    assert curves.keys() == expected.keys()
    for step, row in expected.items():
        assert curves[step].keys() == row.keys(), f"step {step}"
        for name, value in row.items():
            close = pytest.approx(value, rel=rtol, abs=atol, nan_ok=True)
            assert curves[step][name] == close, f"step {step}, {name}"
