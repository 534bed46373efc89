"""A tiny text and recipe in the current folder of each test, whose runs are forks; and results of runs."""

import pytest

from lightning_lowbit.cli.lab.compare.losses import reduced
from tests.cli.run.commands import write_tiny
from tests.launch import FORKS


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_lowbit.cli.lab.compare.command.subprocess", FORKS)
    write_tiny(max_steps=8, val_check_interval=4)


def result(*losses, report=None, **changes):
    """A run of 100 steps for each loss; ``changes`` are entries of its ``run.json``."""
    run = {
        "steps": 100 * len(losses),
        "seconds": 60.0,
        "metrics": {"val_loss": losses[-1]},
        "history": {"val_loss": [[100 * (i + 1), loss] for i, loss in enumerate(losses)]},
        "peak_memory_bytes": 2**30,
    }
    return reduced(run | changes, report)


def rows(**losses):
    """Rows whose seeds end with these losses."""
    return {row: {seed: result(3.0, loss) for seed, loss in enumerate(ends)} for row, ends in losses.items()}
