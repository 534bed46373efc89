"""One of two processes that train a quantized model."""

import warnings

import torch
from torch import nn

from lightning_lowbit import LowBitPrecision, QuantizationMonitor
from tests import ranks
from tests.callbacks.monitors.ranks import counting
from tests.ranks import RANKS, STRATEGIES

STEPS, EVERY = 4, 2

RUNS = [*((strategy, "int4") for strategy in ("ddp", "fsdp2", "fsdp1")), ("fsdp2", "nvfp4")]


class Regression(ranks.Regression):
    """The second rank's share is larger."""

    shape = (32, 32, 5)

    def build(self):
        self.body = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 5))

    def inputs(self, step, batch_idx):
        x, y = super().inputs(step, batch_idx)
        x[16:] *= 3
        return x, y

    def configure_optimizers(self):
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.2)


class Noted(counting(QuantizationMonitor)):
    """Keeps what it judged."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.by_step = {"operands": {}, "weights": {}}

    def _judge(self, step, *measured):
        super()._judge(step, *measured)
        self.by_step["operands"][step] = self._operands
        self.by_step["weights"][step] = self._rows


def train(strategy, casts, shard=False, weights=None, **kwargs):
    """What the monitor found by step, and collectives by step."""
    monitor = Noted(weights=weights)
    trainer = ranks.trainer(
        LowBitPrecision(casts, compute_dtype="fp32"),
        strategy=strategy,
        callbacks=[monitor],
        max_steps=STEPS,
        log_every_n_steps=EVERY,
        **kwargs,
    )
    trainer.fit(Regression(shard))
    return {**monitor.by_step, "collectives": monitor.collectives}


def work():
    results = {
        (name, casts): train(STRATEGIES[name](), casts, shard=name == "fsdp2", devices=RANKS) for name, casts in RUNS
    }
    with warnings.catch_warnings(record=True, action="always") as said:
        train(STRATEGIES["fsdp1"](), "int4", weights=True, devices=RANKS)
    results["said"] = [str(warning.message) for warning in said if "Not measured" in str(warning.message)]
    return results
