"""A model whose gradient noise is measured, and runs of it."""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lowbit import Cast, LinearCasts, LowBitPrecision
from tests.callbacks.monitors.gradient_noise.ranks import E2M1, STOCHASTIC
from tests.curves import event_curves
from tests.lightning_imports import LightningModule, quiet_trainer

NEAREST = LinearCasts(**dict.fromkeys(("fprop_x", "fprop_w", "dgrad_g", "wgrad_g"), Cast(**E2M1)))
NOISY = LinearCasts(wgrad_g=STOCHASTIC, dgrad_w=STOCHASTIC)
METRIC = "gradient_noise/ratio"


class Model(LightningModule):
    """Two layers, and the same batch all the time unless there are several.

    Attributes:
        calls: how often ``training_step`` was called in each optimizer step.
    """

    def __init__(self, lr=0.0, batches=1):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            self.data = torch.randn(batches, 48, 32)
        self.lr, self.calls = lr, Counter()

    def loss(self, x):
        return (self.net(x).float() - x.roll(1, 1)).square().mean()

    def training_step(self, batch, batch_idx):
        self.calls[self.trainer.global_step + 1] += 1
        return self.loss(batch)

    def train_dataloader(self):
        return DataLoader(self.data.repeat(40, 1, 1), batch_size=None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def trainer(casts, *callbacks, **kwargs):
    plugin = casts if isinstance(casts, LowBitPrecision) else LowBitPrecision(casts, compute_dtype="fp32", seed=2)
    return quiet_trainer(plugin, callbacks=list(callbacks), **{"max_steps": 6, "log_every_n_steps": 1, **kwargs})


def fit(model, monitor, casts=NOISY, **kwargs):
    torch.manual_seed(11)
    run = trainer(casts, monitor, **kwargs)
    run.fit(model)
    return run


def steps(monitor):
    return [step for step, _ in monitor.measurements()]


def ratios(monitor):
    return [ratio for _, ratio in monitor.measurements()]


def logged(run, name=METRIC):
    """What the event file holds of a metric, by optimizer step."""
    return {step: row[name] for step, row in event_curves(run).items() if name in row}


def assert_equal(found, wanted, where=""):
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for name in wanted:
            assert_equal(found[name], wanted[name], f"{where}/{name}")
    elif isinstance(wanted, list | tuple):
        for index, pair in enumerate(zip(found, wanted, strict=True)):
            assert_equal(*pair, f"{where}/{index}")
    else:
        same = torch.equal(found, wanted) if isinstance(wanted, Tensor) else found == wanted
        assert same, f"{where} is {found}, without the monitor {wanted}"
