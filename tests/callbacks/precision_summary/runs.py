"""Runs with a precision summary."""

import json
from dataclasses import asdict

from torch import nn

from lightning_lowbit import FP4Precision, PrecisionSummary
from tests.lightning_imports import BoringModel, quiet_trainer

# Of Two, with one sample in a batch: the first layer's input needs no gradient.
FIRST, LAST = 2 * 32 * 32, 2 * 32 * 2
TOTAL = 2 * FIRST + 3 * LAST
SKIP = {"skip": ["layer.2"]}

BITS = {"fqt": (4.5 * 2 * FIRST + 16 * 3 * LAST) / TOTAL, "qaf": (4.5 * FIRST + 16 * (FIRST + 3 * LAST)) / TOTAL}


class Two(BoringModel):
    """Two layers, the second of which the runs here leave alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def trainer_with(*callbacks, plugin=None, **kwargs):
    defaults = {"max_steps": 2, "limit_train_batches": 4, "limit_val_batches": 0}
    if "precision" not in kwargs:
        kwargs["plugins"] = [plugin or FP4Precision(**SKIP, compute_dtype="bf16")]
    return quiet_trainer(callbacks=list(callbacks), **{**defaults, **kwargs})


def fit(*callbacks, model=None, ckpt_path=None, **kwargs):
    """Runs, and returns the summary among the callbacks."""
    trainer_with(*callbacks, **kwargs).fit(model or Two(), ckpt_path=ckpt_path)
    return next((callback for callback in callbacks if isinstance(callback, PrecisionSummary)), None)


def report(*callbacks, model=None, ckpt_path=None, **kwargs):
    """A quiet summary of a run, its data, and its sections as text; the Trainer."""
    trainer = trainer_with(summary := PrecisionSummary(quiet=True), *callbacks, **kwargs)
    trainer.fit(model or Two(), ckpt_path=ckpt_path)
    return summary, summary.report_data(trainer), sections_of(summary, trainer), trainer


def sections_of(summary, trainer):
    return json.dumps([asdict(section) for section in summary.report_sections(trainer)])


CAPTION, COVERAGE, AVERAGE = "weights and biases of converted layers", "Coverage: ", "Average over the run: "
