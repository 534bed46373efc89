"""Runs with planted spikes and NaN, and how they go on."""

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowbit import SpikeRollback
from lightning_lowbit.optim import Adaptive, LowBitAdamW, StableSPAM
from tests.lightning_imports import LightningModule, quiet_trainer

BAD = 11
# A snapshot before step 8, and step 12 is taken before the loss of 11 is read.
KEPT = [*range(8), *range(13, 20)]


class SGD(torch.optim.SGD):
    """Notes the learning rate of each step, for which torch calls hooks twice."""

    def __init__(self, *args, **kwargs):
        torch.optim.SGD([torch.zeros(1)])  # it is the first one of a class that makes its step call hooks
        super().__init__(*args, **kwargs)
        self.rates = []

    def step(self, closure=None):
        loss = super().step(closure)
        self.rates.append(self.param_groups[0]["lr"])
        return loss


OPTIMIZERS = {
    "SGD": lambda p: SGD(p, lr=1e-2),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "StableSPAM": lambda p: StableSPAM(p, lr=1e-2, reset_interval=5, weight_decay=0.1),
    "LowBitAdamW": lambda p: LowBitAdamW(p, lr=1e-2),
    "Adaptive": lambda p: Adaptive(torch.optim.AdamW(p, lr=1e-2)),
}


class Scripted(LightningModule):
    """Learns from batches of which each has a number; some of them are bad.

    Args:
        numbers: of the batches, in their order.
        bad: what is wrong with which: "spike": targets are off; "nan": the loss; "late": the gradient alone.
        optimizer: of `OPTIMIZERS`.
        scheduler: makes one, for each step.
    """

    def __init__(self, numbers, bad=None, optimizer="SGD", scheduler=None):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
        self.numbers, self.bad, self.optimizer, self.scheduler = list(numbers), dict(bad or {}), optimizer, scheduler
        self.losses, self.phases, self.made, self.end = [], [], None, None

    def training_step(self, batch, batch_idx):
        number = self.numbers[self.trainer.fit_loop.epoch_loop.total_batch_idx]
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 16, generator=generator)
        y = x[:, :1] + 0.3 * torch.randn(8, 1, generator=generator)
        kind = self.bad.get(number)
        loss = F.mse_loss(self.body(x).float(), y * (1e4 if kind == "spike" else 1))
        if kind == "nan":
            loss = loss * math.nan
        if kind == "late":
            steep = 1e6 * sum(parameter.float().sum() for parameter in self.parameters())
            loss = loss + (steep - steep.detach())
        self.losses.append(float(loss.detach()))
        self.phases.append(getattr(self.trainer.precision_plugin, "phase", ""))
        return loss

    def train_dataloader(self):
        return DataLoader(range(len(self.numbers)))

    def configure_optimizers(self):
        self.made = OPTIMIZERS[self.optimizer](self.parameters())
        if self.scheduler is None:
            return self.made
        return [self.made], [{"scheduler": self.scheduler(self.made), "interval": "step"}]

    def on_train_end(self):
        self.end = self.everything()

    def everything(self):
        """Copies of weights, buffers and optimizer state."""
        return deepcopy((self.state_dict(), [*self.made.state.values()]))


def rollback(**kwargs):
    """Armed early, with snapshots before each fourth step."""
    return SpikeRollback(**{"warmup_steps": 4, "every_n_steps": 4, "good_for": 1, **kwargs})


def trainer(*callbacks, plugin=None, **kwargs):
    defaults = {"max_epochs": 1, "log_every_n_steps": 1}
    plugins = None if plugin is None else [plugin]
    return quiet_trainer(callbacks=list(callbacks), plugins=plugins, **{**defaults, **kwargs})


def fit(model, *callbacks, ckpt_path=None, **kwargs):
    trainer(*callbacks, **kwargs).fit(model, ckpt_path=ckpt_path)
    return model


RESTORED = "^SpikeRollback((?!Not restored).)*$"  # the warning, of all copies of weights


def rolled_back(*callbacks, model=None, says="SpikeRollback", **kwargs):
    """Twenty steps, or a model's, that warn of a rollback: after a NaN in the loss of step 11, or a model's."""
    with pytest.warns(UserWarning, match=says):
        return fit(model or Scripted(range(20), {BAD: "nan"}), *callbacks, **kwargs)


def steps(callback):
    """(at which step, whose loss, where to) of each rollback."""
    return [tuple(one[name] for name in ("step", "spike", "to")) for one in callback.state_dict()["rollbacks"]]


def assert_undone(model, kept=KEPT):
    """The run ended as the one of the batches that are kept."""
    clean = fit(Scripted(kept, optimizer=model.optimizer))
    assert_same(model.end, clean.end, "not the run without these batches")


def assert_same(found, wanted, what):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")
