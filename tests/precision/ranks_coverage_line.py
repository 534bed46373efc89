"""One of two processes that train a model of which little is converted."""

import logging

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


class Covered(LightningModule):
    """256 of 2560 weights are quantized."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.block = nn.Sequential(Special(16, 64), nn.ReLU(), Special(64, 16), Special(16, 16))

    def configure_model(self):
        if self.device_mesh is not None:
            fully_shard(self.block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, x):
        return self.block(self.first(x))

    def training_step(self, batch):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(8, 16), batch_size=2)


def work():
    results = {}
    for name in ("ddp", "fsdp1", "fsdp2"):
        told = []
        handler = logging.Handler()
        handler.emit = lambda record, told=told: told.append(record.getMessage())
        rank_zero.log.addHandler(handler)
        plugin = FP4Precision("nvfp4")
        quiet_trainer(plugin, max_steps=2, devices=RANKS, strategy=STRATEGIES[name]()).fit(Covered())
        rank_zero.log.removeHandler(handler)
        results[name] = [text for text in told if "quantized layers" in text]
    return results
