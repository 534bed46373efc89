"""Runs of which a trigger begins a phase."""

import torch
from torch.utils.data import DataLoader

from tests.callbacks.switches import runs
from tests.precision.regression_model import Regression


class Texts(Regression):
    """Its batches are 10 token numbers each, from which nothing is learned; validation says 3, 2, and then 2 again."""

    def train_dataloader(self):
        return DataLoader(torch.arange(640).view(64, 10))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", max(3.0 - self.trainer.global_step // 2, 1.0))


def fit(*callbacks, model=None, **kwargs):
    return runs.fit(*callbacks, model=model or Texts(), **kwargs)


def begin(*callbacks, **kwargs):
    """The first step in the phase."""
    return next((step for step, phase, *_ in fit(*callbacks, **kwargs).rows if phase == "qaf"), None)
