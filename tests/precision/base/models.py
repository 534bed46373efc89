"""Models that are trained in low precision."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.lightning_imports import QUIET, BoringModel, LightningModule, Trainer
from tests.precision.regression_model import Regression


def quiet(**kwargs):
    defaults = {"max_steps": 2, "limit_train_batches": 4, "limit_val_batches": 0}
    return Trainer(**{"accelerator": "cpu", **QUIET, **defaults, **kwargs})


class Recorder(BoringModel):
    """Notes what each training step sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.layer.lowbit.keys.tolist(), str(self.layer.casts)))
        return super().training_step(batch, batch_idx)


class Recurrent(Regression):
    """Three times through one MLP, each a checkpoint that computes activations again if it is to."""

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = x + (checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x))
        return self.head(x)


class GAN(LightningModule):
    """Manual optimization with two optimizers."""

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
