"""One of two processes that train a quantized model.

``python -m tests.callbacks.monitors.operand_statistics.ranks 0 FOLDER``.

What the monitor found lies in ``FOLDER/0.pt``, of the other rank in ``FOLDER/1.pt``.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader

from lightning_lowbit import LowBitPrecision, QuantizationMonitor
from tests.launch import take_part
from tests.lightning_imports import (
    DDPStrategy,
    LightningModule,
    ModelParallelStrategy,
    Strategy,
    quiet_trainer,
)
from tests.optim.ranks_lightning import FSDPOnCPU

RANKS, STEPS, EVERY = 2, 4, 2

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "fsdp1": FSDPOnCPU,
}
RUNS = [*((strategy, "int4") for strategy in STRATEGIES), ("ddp", "nvfp4"), ("fsdp2", "nvfp4")]


class Regression(LightningModule):
    """Learns from batches that follow from the step, of which each rank has its share: the second one's is larger."""

    def __init__(self, shard: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.body = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 5))
        self.shard = shard

    def configure_model(self) -> None:
        if self.shard:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            fully_shard(self.body, mesh=mesh)
            fully_shard(self, mesh=mesh)  # type: ignore[arg-type]
            self.shard = False  # it is called again

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.trainer.global_step)
        x, y = torch.randn(32, 32, generator=generator), torch.randn(32, 5, generator=generator)
        x[16:] *= 3
        x, y = (t.chunk(self.trainer.world_size)[self.global_rank] for t in (x, y))
        return F.mse_loss(self(x).float(), y)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.2)  # type: ignore[union-attr]


class Noted(QuantizationMonitor):
    """Keeps what it judged, and counts the collectives at the end of each batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.by_step: dict[str, dict[int, Any]] = {"operands": {}, "weights": {}}
        self.collectives: list[int] = []

    def _judge(self, what: Any, columns: Mapping[str, Any]) -> int:
        step = super()._judge(what, columns)
        self.by_step["operands"][what.step] = self._operands
        self.by_step["weights"][what.step] = self._rows
        return step

    def on_train_batch_end(self, *arguments: Any) -> None:
        with CommDebugMode() as seen:
            super().on_train_batch_end(*arguments)
        self.collectives.append(seen.get_total_counts())


def train(strategy: Strategy | str, casts: str, shard: bool = False, weights: bool | None = None, **kwargs: Any) -> Any:
    """What the monitor found by step, and collectives by step."""
    monitor = Noted(weights=weights)
    trainer = quiet_trainer(
        LowBitPrecision(casts, compute_dtype="fp32"),
        strategy=strategy,
        callbacks=[monitor],
        max_steps=STEPS,
        log_every_n_steps=EVERY,
        use_distributed_sampler=False,
        **kwargs,
    )
    trainer.fit(Regression(shard))
    return {**monitor.by_step, "collectives": monitor.collectives}


def work() -> dict[str, Any]:
    results: Any = {
        (name, casts): train(STRATEGIES[name](), casts, shard=name == "fsdp2", devices=RANKS) for name, casts in RUNS
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(STRATEGIES["fsdp1"](), "int4", weights=True, devices=RANKS)
    results["said"] = [str(warning.message) for warning in said if "Not measured" in str(warning.message)]
    return results


if __name__ == "__main__":
    take_part(RANKS, work)
