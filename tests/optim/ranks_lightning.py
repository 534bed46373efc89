"""One of two processes that train one model through Lightning: ``python -m tests.optim.ranks_lightning 0 FOLDER``.

What came out lies in ``FOLDER/0.pt``, of the other rank in ``FOLDER/1.pt``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from lightning_lowbit import LowBitPrecision
from lightning_lowbit.optim import Adaptive, LowBitAdamW, StableSPAM
from tests.distributed.spreads import full
from tests.launch import take_part
from tests.lightning_imports import (
    DDPStrategy,
    FSDPStrategy,
    LightningModule,
    ModelParallelStrategy,
    Strategy,
    Trainer,
    quiet_trainer,
)

RANKS, STEPS, HALF = 2, 8, 4

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "stable_spam": lambda p: StableSPAM(p, reset_interval=5, weight_decay=0.1),
    "adaptive": lambda p: Adaptive(torch.optim.AdamW(p)),
    "fp8": lambda p: LowBitAdamW(p),
}


class Regression(LightningModule):
    """Learns from batches that follow from the step; each rank has its share of them. One batch has large inputs.

    Args:
        name: of the optimizer.
        shard: cuts the parameters for FSDP2.
    """

    def __init__(self, name: str, shard: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.body = nn.Sequential(nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 1))
        self.name, self.shard = name, shard
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
        generator = torch.Generator().manual_seed(self.trainer.global_step)
        size = 20.0 if self.trainer.global_step == 3 else 1.0
        x, y = size * torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)
        x, y = (t.chunk(self.trainer.world_size)[self.global_rank] for t in (x, y))
        return F.mse_loss(self(x).float(), y)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.name](self.trainer.model.parameters())  # type: ignore[union-attr]

    def on_train_end(self) -> None:
        """Notes all weights: after `fit` the strategy has taken the model down."""
        root: Any = self.trainer.model
        if isinstance(root, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(root, writeback=False):
                self.whole = [p.detach().clone() for p in root.parameters()]
        else:
            self.whole = [full(p) for p in root.parameters()]


class FSDPOnCPU(FSDPStrategy):
    """FSDP1 with gloo: Lightning's own is for accelerators, and gives `FullyShardedDataParallel` an index for one."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "fsdp2, whole checkpoints": lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
    "fsdp1": lambda: FSDPOnCPU(state_dict_type="sharded"),
}

# Of strategy and optimizer, and with or without a plugin, which FSDP1 cannot do without.
RUNS = [
    *((strategy, optimizer, False) for strategy in ("ddp", "fsdp2") for optimizer in OPTIMIZERS),
    *((strategy, "adaptive", True) for strategy in ("ddp", "fsdp2", "fsdp1")),
]
INTERRUPTED = [
    *((strategy, optimizer) for strategy in STRATEGIES for optimizer in ("stable_spam", "fp8") if strategy != "fsdp1"),
    ("fsdp1", "stable_spam"),  # no rank holds rows, which moments in FP8 need
]


def describe(strategy: str, optimizer: str, with_plugin: bool) -> str:
    return f"{strategy}, {optimizer}, {'with' if with_plugin else 'without'} plugin"


def trainer(plugin: LowBitPrecision | None, max_steps: int = STEPS, **kwargs: Any) -> Trainer:
    return quiet_trainer(
        plugins=None if plugin is None else [plugin], max_steps=max_steps, use_distributed_sampler=False, **kwargs
    )


def plugin() -> LowBitPrecision:
    """Without a cast."""
    return LowBitPrecision("bf16", compute_dtype="fp32")


def alone(name: str, ckpt_path: str | None = None) -> list[Tensor]:
    """Weights at the end of a run in one process."""
    model = Regression(name)
    trainer(plugin(), devices=1).fit(model, ckpt_path=ckpt_path)
    return model.whole


def train(strategy: str, optimizer: str, with_plugin: bool, end: int = STEPS, ckpt_path: str | None = None) -> Any:
    """A Trainer of both ranks that has trained, and the weights."""
    model = Regression(optimizer, shard=strategy.startswith("fsdp2"))
    made = plugin() if with_plugin else None
    used = trainer(made, end, devices=RANKS, strategy=STRATEGIES[strategy]())
    used.fit(model, ckpt_path=ckpt_path)
    return used, model.whole


def work() -> dict[str, Any]:
    results: dict[str, Any] = {
        describe(strategy, optimizer, with_plugin): train(strategy, optimizer, with_plugin)[1]
        for strategy, optimizer, with_plugin in RUNS
    }
    for strategy, optimizer in INTERRUPTED:
        first, _ = train(strategy, optimizer, True, HALF)
        path = f"{strategy} {optimizer}.ckpt"
        first.save_checkpoint(path)
        results[path] = train(strategy, optimizer, True, STEPS, path)[1]
    try:
        train("fsdp1", "stable_spam", False)
    except ValueError as error:
        results["not connected"] = str(error)
    return results


if __name__ == "__main__":
    take_part(RANKS, work)
