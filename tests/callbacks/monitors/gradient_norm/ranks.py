"""One of two processes that train a watched model: ``python -m tests.callbacks.monitors.gradient_norm.ranks 0 FOLDER``.

What the monitor logged lies in ``FOLDER/0.pt``, of the other rank in ``FOLDER/1.pt``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader

from lightning_lowbit import GradientNormMonitor, LowBitPrecision
from lightning_lowbit.optim import StableSPAM
from tests.launch import take_part
from tests.lightning_imports import (
    Callback,
    DDPStrategy,
    LightningModule,
    ModelParallelStrategy,
    Strategy,
    Trainer,
    quiet_trainer,
)
from tests.optim.ranks_lightning import FSDPOnCPU

RANKS, STEPS, EVERY = 2, 6, 2
LAYERS = ["body"]

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "fsdp1": FSDPOnCPU,
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
}
# Of strategy, optimizer, and with a plugin or without: with one, FSDP1 clips by norm, too.
RUNS = [(strategy, optimizer, optimizer == "sgd") for strategy in STRATEGIES for optimizer in ("sgd", "stable_spam")]
RUNS[RUNS.index(("fsdp1", "stable_spam", False))] = ("fsdp1", "stable_spam", True)
UNPLUGGED = ("fsdp1", "sgd", False)


class Regression(LightningModule):
    """Learns from batches that follow from the step, of which each rank has its share.

    Three layers, the second with fewer rows than ranks, so that a rank has nothing of it, and one that is not trained.
    """

    def __init__(self, optimizer: str, shard: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.body = nn.Sequential(nn.Linear(16, 9), nn.Linear(9, 1), nn.Linear(1, 3))
            self.frozen = nn.Linear(3, 1).requires_grad_(False)
        self.optimizer, self.shard = optimizer, shard

    def configure_model(self) -> None:
        if self.shard:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            fully_shard(self.body, mesh=mesh)
            fully_shard(self, mesh=mesh)  # type: ignore[arg-type]
            self.shard = False  # it is called again

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.body(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.trainer.global_step)
        x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)
        x, y = (t.chunk(self.trainer.world_size)[self.global_rank] for t in (x, y))
        return 3 * F.mse_loss(self(x).float(), y)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = self.trainer.model.parameters()  # type: ignore[union-attr]
        return torch.optim.SGD(parameters, lr=0.05) if self.optimizer == "sgd" else StableSPAM(parameters, lr=1e-3)


class Watched(GradientNormMonitor):
    """Counts the collectives of each step."""

    def __init__(self) -> None:
        super().__init__(LAYERS, every_n_steps=EVERY)
        self.collectives: list[int] = []

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        with CommDebugMode() as seen:
            super().on_before_optimizer_step(*arguments)
        self.collectives.append(seen.get_total_counts())

    def on_train_batch_end(self, *arguments: Any) -> None:
        with CommDebugMode() as seen:
            super().on_train_batch_end(*arguments)
        self.collectives[-1] += seen.get_total_counts()


class Curves(Callback):
    """What was logged, by step."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("grad_norm")}
        if found and trainer._logger_connector.should_update_logs:
            self.seen[trainer.global_step] = found


def train(strategy: Strategy | str, optimizer: str, with_plugin: bool, shard: bool = False, **kwargs: Any) -> Any:
    """Curves by step, and collectives by step."""
    monitor, curves = Watched(), Curves()
    trainer = quiet_trainer(
        strategy=strategy,
        plugins=[LowBitPrecision("bf16", compute_dtype="fp32")] if with_plugin else None,
        callbacks=[monitor, curves],
        gradient_clip_val=0.5 if with_plugin else None,
        max_steps=STEPS,
        log_every_n_steps=EVERY,
        use_distributed_sampler=False,
        **kwargs,
    )
    trainer.fit(Regression(optimizer, shard))
    return {"curves": curves.seen, "collectives": monitor.collectives}


def work() -> dict[str, Any]:
    return {
        run: train(STRATEGIES[run[0]](), *run[1:], shard=run[0] == "fsdp2", devices=RANKS) for run in [*RUNS, UNPLUGGED]
    }


if __name__ == "__main__":
    take_part(RANKS, work)
