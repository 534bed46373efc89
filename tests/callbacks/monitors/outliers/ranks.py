"""One of two processes that train a model whose outliers are watched."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_lowbit import OutlierMonitor
from tests import ranks
from tests.ranks import RANKS, STRATEGIES

STEPS, EVERY = 6, 2


class MLP(nn.Module):
    """A SwiGLU."""

    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Regression(ranks.Regression):
    """Each batch has an outlier."""

    shape = (32, 16, 1)

    def __init__(self, how="", hidden=9):
        self.hidden = hidden
        super().__init__()
        self.how, self.is_whole = how, how == "tp"  # with tensor parallelism ranks see the same batch

    def build(self):
        self.mlp, self.head = MLP(16, self.hidden), nn.Linear(16, 1)

    def configure_model(self):
        how, self.how = self.how, ""  # it is called again
        if how == "fsdp2":
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.mlp, mesh=mesh)
            fully_shard(self, mesh=mesh)
        if how == "tp":
            plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(self.mlp, self.device_mesh["tensor_parallel"], plan)

    def forward(self, x):
        return self.head(x + self.mlp(x))

    def inputs(self, step, batch_idx):
        x, y = super().inputs(step, batch_idx)
        x[3, 5] = x[20, 5] = 30.0 + step  # in each half of the batch one, far from 6 times the rms of either
        return x, y

    def share(self, tensor):
        return tensor if self.is_whole else super().share(tensor)

    def configure_optimizers(self):
        return torch.optim.SGD(self.trainer.model.parameters(), lr=1e-4, foreach=False)


class Watched(OutlierMonitor):
    """Counts the all-reduces of each step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.collectives = []
        self.written = {}

    def _emit(self, numbers, step, logger_step):
        flat = {f"{quantity}/{layer}": number for quantity, row in numbers.items() for layer, number in row.items()}
        self.written[logger_step + 1] = flat

    def on_train_batch_end(self, *arguments):
        with CommDebugMode() as seen:
            super().on_train_batch_end(*arguments)
        self.collectives.append(sum(n for what, n in seen.get_comm_counts().items() if "reduce" in str(what)))


def train(strategy, how, hidden=9, devices=RANKS, **kwargs):
    """What was written by step, all-reduces by step, and the monitor's state."""
    monitor = Watched(**kwargs)
    trainer = ranks.trainer(
        strategy=strategy, devices=devices, callbacks=[monitor], max_steps=STEPS, log_every_n_steps=EVERY
    )
    trainer.fit(Regression(how, hidden))
    return {"curves": monitor.written, "collectives": monitor.collectives, "state": monitor.state_dict()}


def work():
    results = {how: train(STRATEGIES[how](), how, 8 if how == "tp" else 9) for how in ("ddp", "fsdp2", "tp", "fsdp1")}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(STRATEGIES["fsdp1"](), "fsdp1", swiglu=True)
    results["said"] = [str(warning.message) for warning in said if "Not measured" in str(warning.message)]
    return results
