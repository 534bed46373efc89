"""One of two processes that train a model of which little is converted."""

import logging
import warnings

import torch
from lightning_utilities.core import rank_zero
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_lowbit import FP4Precision
from tests.lightning_imports import LightningModule, quiet_trainer
from tests.ranks import RANKS, STRATEGIES


class Special(nn.Linear):
    """Stays what it is, since it has a forward of its own."""

    def forward(self, input):
        return super().forward(input)


class Model(LightningModule):
    """Tokens ``[2, 8, 16]`` through ``nn.Linear(16, 16)`` and what is to be counted."""

    def __init__(self, *rest):
        super().__init__()
        self.first, self.rest = nn.Linear(16, 16), nn.Sequential(*rest)

    def configure_model(self):
        if self.device_mesh is not None:
            for part in (self.rest, self):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def forward(self, x):
        return self.rest(self.first(x))

    def training_step(self, batch):
        return self(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 8, 16, generator=torch.Generator().manual_seed(1)), batch_size=2)


class Reading(Model):
    """Reads the weight of the first layer, which it does not call."""

    def forward(self, x):
        return self.rest(nn.functional.linear(x, self.first.weight))


def special():
    return nn.Sequential(Special(16, 64), nn.ReLU(), Special(64, 16))


def work():
    results = {}
    for name in ("ddp", "fsdp1", "fsdp2"):
        told = []
        handler = logging.Handler()
        handler.emit = lambda record, told=told: told.append(record.getMessage())
        rank_zero.log.addHandler(handler)
        model = Model(special(), Special(16, 16))  # 256 of 2560 weights are quantized
        quiet_trainer(FP4Precision("nvfp4"), max_steps=2, devices=RANKS, strategy=STRATEGIES[name]()).fit(model)
        rank_zero.log.removeHandler(handler)
        results[name] = [text for text in told if "quantized layers" in text]
    reading, strategy = Reading(nn.Linear(16, 16), nn.Linear(16, 16)), STRATEGIES["ddp, unused parameters"]()
    with warnings.catch_warnings(record=True, action="always") as caught:
        quiet_trainer(FP4Precision("nvfp4"), max_steps=2, devices=RANKS, strategy=strategy).fit(reading)
    return results, [str(each.message) for each in caught if "without a call" in str(each.message)]
