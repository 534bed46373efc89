"""Runs of which a trigger begins a phase."""

import torch
from torch.utils.data import DataLoader

from tests.lightning_imports import Callback
from tests.precision.regression_model import Regression, flat, trainer, two_casts


class Phases(Callback):
    """The phase of each optimizer step; a checkpoint after each, if it shall."""

    def __init__(self, keep):
        self.seen = {}
        self.keep = keep

    def on_train_batch_start(self, trainer, *_):
        phase = trainer.precision_plugin.phase
        assert self.seen.setdefault(trainer.global_step, phase) == phase, "it changes within a step"

    def on_train_batch_end(self, trainer, *_):
        if self.keep and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(f"{trainer.global_step}.ckpt")


class Texts(Regression):
    """Its batches are 10 token numbers each, from which nothing is learned; validation says 3, 2, and then 2 again."""

    def train_dataloader(self):
        return DataLoader(torch.arange(640).view(64, 10))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", max(3.0 - self.trainer.global_step // 2, 1.0))


def fit(*callbacks, keep=False, ckpt_path=None, **kwargs):
    """Eight steps: the phases by step, and the weights."""
    model, witness = kwargs.pop("model", None) or Texts(), Phases(keep)
    defaults = {"max_steps": 8, "limit_train_batches": 64, "num_sanity_val_steps": 0}
    made = trainer(two_casts(), callbacks=[*callbacks, witness], **{**defaults, **kwargs})
    made.fit(model, ckpt_path=ckpt_path)
    return witness.seen, flat(model)


def begin(*callbacks, **kwargs):
    """The first step in the phase."""
    phases, _ = fit(*callbacks, **kwargs)
    return next((step for step, phase in phases.items() if phase == "qaf"), None)
