"""A model with planted outliers, and runs of it."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowbit import OutlierMonitor
from tests.callbacks.monitors.ranks import MLP
from tests.curves import assert_curves, event_curves
from tests.lightning_imports import LightningModule, TensorBoardLogger, quiet_trainer

CLOSE = {"rtol": 1e-5, "atol": 1e-7}  # sums of float32 in another order
LAYERS = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "lm_head"]


class Model(LightningModule):
    """Learns from batches that follow from their number; those that are planned hold an outlier in channel 5."""

    def __init__(self, planned=None, wrap=None):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.mlp, self.lm_head = MLP(16, 12), nn.Linear(16, 4)
        self.planned, self.wrap = planned or {}, wrap
        self.seen = {}  # what enters the MLP, by optimizer step

    def batch(self, number):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        x[3, 5] = self.planned.get(number, x[3, 5].item())
        return x

    def forward(self, x):
        return self.lm_head(x + (self.wrap(self.mlp, x) if self.wrap else self.mlp(x)))

    def training_step(self, batch, batch_idx):
        x = self.batch(self.trainer.fit_loop.epoch_loop.total_batch_idx)
        self.seen.setdefault(self.trainer.global_step + 1, []).append(x)
        return self(x).float().square().mean()

    def validation_step(self, batch, batch_idx):
        self(torch.full((4, 16), 1000.0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def train_dataloader(self):
        return DataLoader(range(256))

    def val_dataloader(self):
        return DataLoader(range(2))


def trainer(*callbacks, **kwargs):
    defaults = {"max_steps": 6, "log_every_n_steps": 1, "limit_val_batches": 0}
    return quiet_trainer(callbacks=list(callbacks), **{**defaults, **kwargs})


def logged(run):
    """What the event file holds of layers and MLPs."""
    return event_curves(run, lambda name: "/" in name)


def fit(model, monitor=None, **kwargs):
    run = trainer(monitor or OutlierMonitor(), logger=TensorBoardLogger("."), **kwargs)
    run.fit(model)
    return logged(run)


assert_same = partial(assert_curves, rtol=CLOSE["rtol"], atol=CLOSE["atol"])
