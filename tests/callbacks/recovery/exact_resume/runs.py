"""Runs that note what their batches draw, data that remember their place, and warnings."""

import random
import warnings
from contextlib import contextmanager

import numpy as np
import torch

from lightning_lowbit import ExactResume
from tests.lightning_imports import BoringModel, quiet_trainer


class Draws(BoringModel):
    """Notes the numbers that each batch draws, and where in the run it is."""

    def __init__(self):
        super().__init__()
        self.seen, self.places = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append((torch.rand(()).item(), np.random.rand(), random.random()))
        self.places.append((self.trainer.current_epoch, batch_idx, self.trainer.global_step))
        return super().training_step(batch, batch_idx)


def run(model, *callbacks, ckpt_path=None, resume=None, **kwargs):
    callbacks = [resume or ExactResume(), *callbacks]
    trainer = quiet_trainer(callbacks=callbacks, **{"limit_train_batches": 6, "limit_val_batches": 0, **kwargs})
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


class Loader:
    """Noisy batches in a new order each epoch; it remembers its place."""

    def __init__(self, size=8):
        self.size, self.order, self.place = size, None, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        if self.place in (0, self.size):
            self.order, self.place = torch.randperm(self.size).tolist(), 0
        while self.place < self.size:
            number, self.place = self.order[self.place], self.place + 1
            yield number + torch.randn(1, 32)

    def state_dict(self):
        return {"order": self.order, "place": self.place}

    def load_state_dict(self, state):
        self.order, self.place = state["order"], state["place"]


class Unsized(Loader):
    """Without a length Lightning fetches a batch ahead."""

    __len__ = None


class Augmented(Draws):
    def __init__(self, data=Loader):
        super().__init__()
        self.data = data

    def train_dataloader(self):
        return self.data()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch + random.random() * np.random.rand()

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.tolist())
        return super().training_step(batch, batch_idx)


@contextmanager
def warned():
    """The texts of warnings."""
    messages = []
    with warnings.catch_warnings(record=True, action="always") as records:
        yield messages
    messages += [str(warning.message) for warning in records]
