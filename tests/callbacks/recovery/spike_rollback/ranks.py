"""One of two processes that train one model and go back, in the named `RUNS`.

Of both ranks only one sees the bad batch.
"""

import math
import sys
import warnings

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_lowbit import SpikeRollback
from tests.lightning_imports import pytorch
from tests.optim.ranks_lightning import Regression, plugin
from tests.ranks import RANKS, STRATEGIES, trainer

EMAWeightAveraging = pytorch.callbacks.EMAWeightAveraging

BAD, KIND = 7, {"spike": 1e3, "nan": math.nan}
KEPT = [0, 1, 2, 3, *range(9, 14)]  # a snapshot before step 4, and step 8 is taken before the loss of 7 is read
RUNS = {
    f"{strategy}, {optimizer}, {kind}": (strategy, optimizer, kind, None)
    for strategy in ("ddp", "fsdp2", "fsdp1")
    for optimizer in ("adaptive", "fp8")
    for kind in KIND
    if (strategy, optimizer) != ("fsdp1", "fp8")  # no rank holds rows, which moments in FP8 need
}
RUNS["ddp, adaptive, nan, averaged"] = ("ddp", "adaptive", "nan", lambda: EMAWeightAveraging(decay=0.5))


class OneSided(Regression):
    """Of some batches one rank's share is large, or its loss is not finite.

    Args:
        numbers: of the batches, in their order.
        factor: what the outputs of the bad batch are to be.
    """

    def __init__(self, name, shard, numbers, factor):
        super().__init__(name, shard)
        self.numbers, self.factor = numbers, factor

    def configure_model(self):
        """Shards the root alone, whose weights FSDP2 keeps after a forward pass without a backward pass."""
        if self.shard:
            fully_shard(self, mesh=self.device_mesh["data_parallel"])
            self.shard = False  # it is called again

    def training_step(self, batch, batch_idx):
        number = self.numbers[batch_idx]
        generator = torch.Generator().manual_seed(100 * number + self.global_rank)
        x, y = torch.randn(4, 16, generator=generator), torch.randn(4, 1, generator=generator)
        if number == BAD and self.global_rank == 1:
            y = y * self.factor
        return F.mse_loss(self(x).float(), y)

    def on_train_batch_end(self, *_):
        """Looks at an output between steps, after which FSDP keeps the weights that it has gathered."""
        with torch.no_grad():
            self.trainer.model(torch.ones(4, 16))

    def validation_step(self, batch, batch_idx):
        self(torch.ones(4, 16))

    def val_dataloader(self):
        return DataLoader(range(1))


def train(strategy, optimizer, kind, numbers, *callbacks):
    """Weights after a run with a validation before it and one amid it, after which FSDP leaves what it gathered."""
    model = OneSided(optimizer, strategy.startswith("fsdp2"), numbers, KIND[kind])
    run = trainer(
        plugin(),
        max_steps=len(numbers),
        devices=RANKS,
        strategy=STRATEGIES[strategy](),
        callbacks=list(callbacks),
        val_check_interval=6,
    )
    run.fit(model)
    return model.whole


def work():
    results = {}
    for name in sys.argv[3:]:
        strategy, optimizer, kind, average = RUNS[name]
        averages = [[average()] if average else [] for _ in range(2)]
        rollback = SpikeRollback(warmup_steps=3, every_n_steps=4, good_for=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the rollback, and of averages with configure_model
            weights = train(strategy, optimizer, kind, range(14), rollback, *averages[0])
            clean = train(strategy, optimizer, kind, KEPT, *averages[1])
        results[name] = {
            "weights": weights,
            "clean": clean,
            "steps": [[one[name] for name in ("step", "spike", "to")] for one in rollback.state_dict()["rollbacks"]],
            "good": rollback.state_dict()["good"],
        }
    return results
