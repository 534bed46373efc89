"""One of two processes that train a model whose outliers are watched:
``python -m tests.callbacks.monitors.outliers.ranks 0 FOLDER``.

What the monitor logged lies in ``FOLDER/0.pt``, of the other rank in ``FOLDER/1.pt``.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_lowbit import OutlierMonitor
from lightning_lowbit.callbacks.monitors.base import LayerNumbers
from tests.launch import take_part
from tests.lightning_imports import (
    DDPStrategy,
    LightningModule,
    ModelParallelStrategy,
    Strategy,
    quiet_trainer,
)
from tests.optim.ranks_lightning import FSDPOnCPU

RANKS, STEPS, EVERY = 2, 6, 2

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "tp": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
    "fsdp1": FSDPOnCPU,
}


class MLP(nn.Module):
    """A SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Regression(LightningModule):
    """Learns from batches that follow from the step, of which each rank has its share. Each has an outlier."""

    def __init__(self, how: str = "", hidden: int = 9) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.mlp, self.head = MLP(16, hidden), nn.Linear(16, 1)
        self.how, self.is_whole = how, how == "tp"  # with tensor parallelism ranks see the same batch

    def configure_model(self) -> None:
        how, self.how = self.how, ""  # it is called again
        if how == "fsdp2":
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            fully_shard(self.mlp, mesh=mesh)
            fully_shard(self, mesh=mesh)  # type: ignore[arg-type]
        if how == "tp":
            plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(self.mlp, self.device_mesh["tensor_parallel"], plan)  # type: ignore[index,arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.mlp(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.trainer.global_step)
        x, y = torch.randn(32, 16, generator=generator), torch.randn(32, 1, generator=generator)
        # In each half of the batch one, far from 6 times the rms of either.
        x[3, 5] = x[20, 5] = 30.0 + self.trainer.global_step
        if not self.is_whole:
            x, y = (t.chunk(self.trainer.world_size)[self.global_rank] for t in (x, y))
        return F.mse_loss(self(x).float(), y)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=1e-4, foreach=False)  # type: ignore[union-attr]


class Watched(OutlierMonitor):
    """Counts the all-reduces of each step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.collectives: list[int] = []
        self.written: dict[int, dict[str, float]] = {}

    def _emit(self, numbers: LayerNumbers, step: int, logger_step: int) -> None:
        flat = {f"{quantity}/{layer}": number for quantity, row in numbers.items() for layer, number in row.items()}
        self.written[logger_step + 1] = flat

    def on_train_batch_end(self, *arguments: Any) -> None:
        with CommDebugMode() as seen:
            super().on_train_batch_end(*arguments)
        self.collectives.append(sum(n for what, n in seen.get_comm_counts().items() if "reduce" in str(what)))


def train(strategy: Strategy | str, how: str, hidden: int = 9, devices: int = RANKS, **kwargs: Any) -> dict[str, Any]:
    """What was written by step, all-reduces by step, and the monitor's state."""
    monitor = Watched(**kwargs)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=devices,
        callbacks=[monitor],
        max_steps=STEPS,
        log_every_n_steps=EVERY,
        use_distributed_sampler=False,
    )
    trainer.fit(Regression(how, hidden))
    return {"curves": monitor.written, "collectives": monitor.collectives, "state": monitor.state_dict()}


def work() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for how, make in STRATEGIES.items():
        results[how] = train(make(), how, 8 if how == "tp" else 9)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(FSDPOnCPU(), "fsdp1", swiglu=True)
    results["said"] = [str(warning.message) for warning in said if "Not measured" in str(warning.message)]
    return results


if __name__ == "__main__":
    take_part(RANKS, work)
