"""Runs whose operands and weights are watched."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_lowbit import LowBitPrecision, QuantizationMonitor, TernaryPrecision
from lightning_lowbit.nn import OPERANDS
from tests.curves import csv_curves
from tests.lightning_imports import BoringModel, Callback, CSVLogger, RandomDataset, quiet_trainer

LAYERS = ["layer.0", "layer.2"]
NAMES = {"sqnr", "underflow", "saturation", "scale_min", "scale_max"}
MEANS = {"sqnr", "underflow", "saturation"}
WEIGHTS = {"minus", "zeros", "plus", "flips", "distance"}
TERNARY = partial(TernaryPrecision, quantize_output=True, compute_dtype="bf16")
FORWARD, BACKWARD = OPERANDS[:2], OPERANDS[2:]


class Two(BoringModel):
    """Data that differ from step to step; the loss of a batch may be multiplied."""

    def __init__(self, factors=None, recompute=False, lr=0.01):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.layer = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
        self.factors, self.recompute, self.lr = factors or {}, recompute, lr

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x)

    def training_step(self, batch, batch_idx):
        return self(batch).float().square().mean() * self.factors.get(batch_idx, 1.0)

    def validation_step(self, batch, batch_idx):
        self(100 * batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return DataLoader(RandomDataset(32, 64 * 12), batch_size=12)


class AtStep(Callback):
    """Does something to a run before one of its batches."""

    def __init__(self, batch, action):
        self.batch, self.action = batch, action

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            self.action(trainer)


def trainer(*callbacks, plugin="nvfp4", **kwargs):
    defaults = {"max_steps": 4, "log_every_n_steps": 2, "limit_val_batches": 0, "logger": CSVLogger("logs")}
    plugins = [LowBitPrecision(plugin) if isinstance(plugin, str) else plugin] if plugin else None
    return quiet_trainer(plugins=plugins, callbacks=list(callbacks), **{**defaults, **kwargs})


def ternary_trainer(*callbacks, plugin=None, **kwargs):
    return trainer(*callbacks, plugin=plugin or TERNARY(), **{"max_steps": 6, **kwargs})


def logged(run, names=NAMES):
    """What was logged of operands, by the step it was logged at."""
    return csv_curves(run, lambda name: name.split("/")[0] in names)


def rows(run):
    """What was logged of weights."""
    return logged(run, WEIGHTS)


def of_layers(row):
    """The numbers by name, by layer and operand."""
    values = {}
    for tag, value in row.items():
        name, operand, *layer = tag.split("/")
        if layer:
            values.setdefault((layer[0], operand), {})[name] = value
    return values


def fit(model=None, *callbacks, **kwargs):
    run = trainer(*callbacks, QuantizationMonitor(weights=False), **kwargs)
    run.fit(model or Two())
    return logged(run)
