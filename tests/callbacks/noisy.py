"""One of two processes that train a model whose noise is measured: ``python -m tests.callbacks.noisy 0 FOLDER``.

What was measured lies in ``FOLDER/0.pt``, of the other rank in ``FOLDER/1.pt``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from lightning_lowbit import Cast, GradientNoiseMonitor, LinearCasts, LowBitPrecision
from tests.launch import take_part
from tests.optim.distributed import full
from tests.optim.trainers import FSDPOnCPU

RANKS, STEPS = 2, 4

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "ddp, static graph": lambda: DDPStrategy(static_graph=True),
    "ddp, unused parameters": lambda: DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True),
    "fsdp1": FSDPOnCPU,
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
}
E2M1 = {"element": "e2m1", "scale": {"block": 16, "format": "e4m3", "two_level": True}}
STOCHASTIC = Cast(**E2M1, rounding="stochastic")
CASTS = {
    # Only a weight draws, with the same bits on all ranks: the noise does not depend on who computes which tokens.
    "weight": LinearCasts(dgrad_w=STOCHASTIC),
    "everything": LinearCasts.preset("nvfp4"),
    "nearest": LinearCasts(fprop_w=Cast(**E2M1), fprop_x=Cast(**E2M1)),
}
# Of strategy, casts and micro-batches in a step.
RUNS = [
    *((strategy, "weight", micro) for strategy in ("ddp", "fsdp1", "fsdp2") for micro in (1, 2)),
    *((strategy, "everything", 1) for strategy in STRATEGIES),
    *((strategy, "everything", 2) for strategy in ("ddp", "fsdp1", "fsdp2")),
    *((strategy, "nearest", 1) for strategy in ("ddp", "fsdp1", "fsdp2")),
]


class Regression(LightningModule):
    """Learns from batches that follow from the step and the micro-batch, of which each rank has its share.

    One layer has fewer rows than ranks, so that a rank has nothing of it; one may be there that no loss depends on.
    """

    def __init__(self, dropout: float = 0.0, shard: bool = False, unused: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            layers = nn.Linear(16, 40), nn.Tanh(), nn.Dropout(dropout), nn.Linear(40, 24), nn.Linear(24, 1)
            self.body = nn.Sequential(*layers)
            self.unused = nn.Linear(3, 3) if unused else None
        self.shard = shard
        self.whole: list[Tensor] = []

    def configure_model(self) -> None:
        if self.shard:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            fully_shard(self.body, mesh=mesh)
            fully_shard(self, mesh=mesh)  # type: ignore[arg-type]
            self.shard = False  # it is called again

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch_idx)
        x, y = torch.randn(32, 16, generator=generator), torch.randn(32, 1, generator=generator)
        x, y = (t.chunk(self.trainer.world_size)[self.global_rank] for t in (x, y))
        return 3 * F.mse_loss(self(x).float(), y)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.02)  # type: ignore[union-attr]

    def on_train_end(self) -> None:
        """Notes all weights: after ``fit`` the strategy has taken the model down."""
        root: Any = self.trainer.model
        if isinstance(root, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(root, writeback=False):
                self.whole = [p.detach().clone() for p in root.parameters()]
        else:
            self.whole = [full(p).clone() for p in root.parameters()]


class Gradients(Callback):
    """Whether a measurement leaves gradients as they are; it comes after the monitor."""

    def __init__(self, monitor: GradientNoiseMonitor) -> None:
        self.same: list[bool] = []
        before: list[Tensor | None] = []
        source: Any = monitor._source
        take = source.take

        def watched(*arguments: Any) -> Any:
            parameters = [*source._trainer.model.parameters()]
            before[:] = [None if p.grad is None else full(p.grad).clone() for p in parameters]
            found = take(*arguments)
            after = [None if p.grad is None else full(p.grad) for p in parameters]
            pairs = list(zip(before, after, strict=True))
            self.same.append(all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs))
            return found

        source.take = watched


def train(name: str, casts: str, micro: int, measured: bool = True) -> Any:
    """Measurements, weights at the end, and whether gradients stayed what they were.

    Without a strategy in one process.
    """
    monitor = GradientNoiseMonitor(1, average=1, layers=[r"body\.\d"])
    gradients = Gradients(monitor)
    trainer = Trainer(
        accelerator="cpu",
        strategy=STRATEGIES[name]() if name in STRATEGIES else "auto",
        devices=RANKS if name in STRATEGIES else 1,
        plugins=[LowBitPrecision(CASTS[casts], compute_dtype="bf16" if casts == "nearest" else "fp32", seed=5)],
        callbacks=[monitor] if measured else None,
        max_steps=STEPS,
        accumulate_grad_batches=micro,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model = Regression(0.0 if casts == "weight" else 0.2, name == "fsdp2", "unused" in name)
    torch.manual_seed(1 + trainer.global_rank)
    trainer.fit(model)
    layers = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("gradient")}
    return {
        "measurements": monitor.measurements(),
        "layers": layers,
        "weights": model.whole,
        "same gradients": gradients.same,
        "random": torch.rand(4),
    }


def work() -> dict[str, Any]:
    return {(*run, measured): train(*run, measured) for run in RUNS for measured in (True, False)}


if __name__ == "__main__":
    take_part(RANKS, work)
