"""A model whose gradient norms are known, and runs of it."""

from functools import partial

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from lightning_lowbit import GradientNormMonitor
from lightning_lowbit.optim import Adaptive, StableSPAM
from tests.curves import assert_curves, event_curves
from tests.lightning_imports import BoringModel, RandomDataset, TensorBoardLogger, quiet_trainer


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=1e-3)


class Planned(BoringModel):
    """The loss, and so the gradient, of some batches is multiplied; what torch says of the norms is kept.

    Attributes:
        seen: by optimizer step, before clipping and at the end of the batch.
    """

    def __init__(self, factors=None, make_optimizer=sgd):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2))
        self.factors, self.make_optimizer = factors or {}, make_optimizer
        self.seen = {}

    @property
    def factor(self):
        return self.factors.get(self.trainer.fit_loop.epoch_loop.total_batch_idx, 1.0)

    def norm(self, module):
        return float(get_total_norm([p.grad.float() for p in module.parameters() if p.grad is not None]))

    def norms(self, stage):
        return {stage: self.norm(self), **{f"{stage}/layer.{i}": self.norm(self.layer[i]) for i in (0, 1)}}

    def training_step(self, batch, batch_idx):
        return self.layer(batch).float().square().mean() * self.factor

    def on_before_optimizer_step(self, optimizer):
        self.seen[self.trainer.global_step + 1] = self.norms("unclipped")

    def on_train_batch_end(self, *_):
        if self.trainer.global_step in self.seen:
            self.seen[self.trainer.global_step] |= self.norms("clipped")

    def configure_optimizers(self):
        return self.make_optimizer(self)

    def train_dataloader(self):
        torch.manual_seed(5)
        return DataLoader(RandomDataset(32, 64))


def trainer(*callbacks, **kwargs):
    defaults = {"max_steps": 6, "log_every_n_steps": 1, "limit_val_batches": 0}
    return quiet_trainer(callbacks=list(callbacks), **{**defaults, **kwargs})


def logged(run):
    curves = event_curves(run)
    return {step: {name.removeprefix("grad_norm/"): v for name, v in row.items()} for step, row in curves.items()}


def fit(model, monitor=None, **kwargs):
    """What is logged of a run."""
    run = trainer(monitor or GradientNormMonitor([r"layer\.\d"]), logger=TensorBoardLogger("."), **kwargs)
    run.fit(model)
    return logged(run)


assert_same = partial(assert_curves, rtol=1e-6)
"""Norms of sums: the same squares in another order and rounded some five times more, in float32 (2^-24 = 6e-8 each)."""


RULES = {
    "Stable-SPAM": lambda module: StableSPAM(module.parameters(), lr=1e-3),
    "matrices only": lambda module: StableSPAM(module.parameters(), lr=1e-3, matrices_only=True),
    "wrapped": lambda module: Adaptive(torch.optim.AdamW(module.parameters())),
    "without rules": lambda module: StableSPAM(module.parameters(), lr=1e-3, element_clip=None, norm_clip=None),
}


class Constant(Planned):
    """The norm of the gradient is the factor of the batch, but for rounding."""

    def training_step(self, batch, batch_idx):
        return self.layer[0].bias.sum() * self.factor / 2  # four elements
