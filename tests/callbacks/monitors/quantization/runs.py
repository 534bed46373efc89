"""Runs whose quantization errors are monitored."""

from functools import partial

from lightning_lowbit import TernaryPrecision
from tests.callbacks.monitors.operand_statistics import runs
from tests.callbacks.monitors.operand_statistics.runs import LAYERS, Two
from tests.lightning_imports import Callback

__all__ = ["ALL", "LAYERS", "TERNARY", "AtStep", "Two", "rows", "trainer", "zeros"]

ALL = {"minus", "zeros", "plus", "flips", "distance"}
TERNARY = partial(TernaryPrecision, quantize_output=True, compute_dtype="bf16")


class AtStep(Callback):
    """Does something to a run before one of its batches."""

    def __init__(self, batch, action):
        self.batch, self.action = batch, action

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            self.action(trainer)


def trainer(*callbacks, plugin=None, **kwargs):
    return runs.trainer(*callbacks, plugin=plugin or TERNARY(), **{"max_steps": 6, **kwargs})


def rows(run):
    """What was logged of weights, by the step it was logged at."""
    return runs.logged(run, ALL)


def zeros(weight):
    weight.zero_()
