"""Runs whose quantization errors are monitored."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowbit import TernaryPrecision
from tests.curves import csv_curves
from tests.lightning_imports import BoringModel, Callback, CSVLogger, RandomDataset, quiet_trainer

LAYERS = ("layer.0", "layer.2")
SHARES = {"minus", "zeros", "plus"}
ALL = {*SHARES, "flips", "distance"}


class Two(BoringModel):
    """Steps that flip codes, on data that differ from step to step."""

    def __init__(self, lr=0.05):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 2))
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 64), batch_size=2)


class AtStep(Callback):
    """Does something to a run before one of its batches."""

    def __init__(self, batch, action):
        self.batch, self.action = batch, action

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            self.action(trainer)


TERNARY = partial(TernaryPrecision, quantize_output=True, compute_dtype="bf16")


def trainer(*callbacks, plugin=None, **kwargs):
    defaults = {"max_steps": 6, "log_every_n_steps": 2, "limit_val_batches": 0, "logger": CSVLogger("logs")}
    plugins = [plugin or TERNARY()]
    return quiet_trainer(plugins=plugins, callbacks=list(callbacks), **{**defaults, **kwargs})


def rows(run):
    """What was logged of weights, by the step it was logged at."""
    return csv_curves(run, lambda name: name.split("/")[0] in ALL)


def zeros(weight):
    weight.zero_()
