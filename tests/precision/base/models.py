"""Models that are trained in low precision."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.lightning_imports import BoringModel, LightningModule
from tests.precision.regression_model import Regression


class Recurrent(Regression):
    """Three times through one MLP, each a checkpoint that computes activations again if it is to."""

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = x + (checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x))
        return self.head(x)


class GAN(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(32, 32), nn.Linear(32, 1)
        self.train_dataloader = BoringModel().train_dataloader

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        for optimizer, loss in (
            (critic, lambda: self.critic(self.generator(batch).detach()).mean() - self.critic(batch).mean()),
            (generator, lambda: -self.critic(self.generator(batch)).mean()),
        ):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.generator, self.critic)]


class Classifier(LightningModule):
    """Learns fast, so that amaxes of a few steps before are too small."""

    def __init__(self, rate=0.05, momentum=0.9):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.options = {"lr": rate, "momentum": momentum}

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x).float(), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), **self.options)
