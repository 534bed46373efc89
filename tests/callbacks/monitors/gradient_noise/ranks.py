"""One of two processes that train a model whose noise is measured:
``python -m tests.callbacks.monitors.gradient_noise.ranks 0 FOLDER``.

What was measured lies in ``FOLDER/0.pt``, of the other rank in ``FOLDER/1.pt``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from lightning_lowbit import Cast, GradientNoiseMonitor, LinearCasts, LowBitPrecision
from tests.distributed.spreads import full
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

RANKS, STEPS, HALF = 2, 3, 2

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "ddp, static graph": lambda: DDPStrategy(static_graph=True),
    "ddp, unused parameters": lambda: DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True),
    "fsdp1": lambda: FSDPOnCPU(state_dict_type="sharded"),
    "fsdp1, flat": lambda: FSDPOnCPU(use_orig_params=False),
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
}
E2M1 = {"element": "e2m1", "scale": {"block": 16, "format": "e4m3", "two_level": True}}
STOCHASTIC = Cast(**E2M1, rounding="stochastic")
CASTS = {
    # Only a weight draws, with the same bits on all ranks: the noise does not depend on who computes which tokens.
    "weight": LinearCasts(dgrad_w=STOCHASTIC),
    "everything": LinearCasts.preset("nvfp4"),
    "nearest": LinearCasts(fprop_w=Cast(**E2M1), fprop_x=Cast(**E2M1), dgrad_g=Cast(**E2M1)),
}
# Of strategy, casts and micro-batches in a step: two draws.
RUNS = [
    ("ddp", "weight", 1),
    ("ddp", "weight", 2),
    ("fsdp2", "weight", 1),
    ("ddp", "everything", 2),
    ("ddp, static graph", "everything", 1),
    ("ddp, unused parameters", "everything", 1),
    ("fsdp2", "everything", 1),
    ("fsdp2", "nearest", 1),
    ("ddp", "nearest", 1),
]
# Strategies under which layers are asked.
ASKED = ("ddp", "fsdp1", "fsdp1, flat", "fsdp2")


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
        micro = batch_idx % self.trainer.accumulate_grad_batches  # a resumed run may count batches from elsewhere
        generator = torch.Generator().manual_seed(100 * self.trainer.global_step + micro)
        x, y = torch.randn(32, 16, generator=generator), torch.randn(32, 1, generator=generator)
        x, y = (t.chunk(self.trainer.world_size)[self.global_rank] for t in (x, y))
        return 3 * F.mse_loss(self(x).float(), y)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.02, momentum=0.5)  # type: ignore[union-attr]

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
        take = source.before_backward

        def watched(trainer: Any, *arguments: Any) -> Any:
            parameters = [*trainer.model.parameters()]
            before[:] = [None if p.grad is None else full(p.grad).clone() for p in parameters]
            found = take(trainer, *arguments)
            after = [None if p.grad is None else full(p.grad) for p in parameters]
            pairs = list(zip(before, after, strict=True))
            self.same.append(all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs))
            return found

        source.before_backward = watched


class Save(Callback):
    """Leaves a checkpoint at the end, while the strategy still has the model."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def trainer(name: str, casts: str, *callbacks: Callback, **kwargs: Any) -> Trainer:
    """Without a strategy in one process."""
    defaults = {"max_steps": STEPS, "log_every_n_steps": 1, "use_distributed_sampler": False}
    return quiet_trainer(
        LowBitPrecision(CASTS[casts], compute_dtype="bf16" if casts == "nearest" else "fp32", seed=5),
        strategy=STRATEGIES[name]() if name in STRATEGIES else "auto",
        devices=RANKS if name in STRATEGIES else 1,
        callbacks=list(callbacks),
        **{**defaults, **kwargs},
    )


def layers_of(run: Trainer) -> dict[str, float]:
    """What was logged of layers, and of all together."""
    return {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("gradient")}


def train(name: str, casts: str, micro: int, measured: bool = True) -> Any:
    """Measurements by two draws, weights at the end, and whether gradients stayed what they were."""
    monitor = GradientNoiseMonitor(1, average=1, layers=[r"body\.\d"])
    gradients = Gradients(monitor)
    run = trainer(name, casts, *([monitor] if measured else []), accumulate_grad_batches=micro)
    model = Regression(0.0 if casts == "weight" else 0.2, name == "fsdp2", "unused" in name)
    torch.manual_seed(1 + run.global_rank)
    run.fit(model)
    return {
        "measurements": monitor.measurements(),
        "layers": layers_of(run),
        "weights": model.whole,
        "same gradients": gradients.same,
        "random": torch.rand(4),
    }


def ask(name: str, measured: bool = True, steps: int = STEPS, start: str | None = None, end: str | None = None) -> Any:
    """Measurements by layers, and weights at the end.

    Args:
        name: of the strategy.
        measured: whether there is a monitor.
        steps: at which it stops.
        start: the checkpoint from which it goes on.
        end: where to leave one.
    """
    monitor = GradientNoiseMonitor(1, kind="layers", average=STEPS, layers=[r"body\.\d"])
    # An epoch is a step: Lightning resumes with the next epoch.
    kwargs: Any = {"max_steps": steps, "limit_train_batches": 1}
    callbacks = [*([monitor] if measured else []), *([Save(end)] if end is not None else [])]
    run = trainer(name, "everything", *callbacks, **kwargs)
    model = Regression(shard=name == "fsdp2")
    torch.manual_seed(1)
    run.fit(model, ckpt_path=start)
    return {"measurements": monitor.measurements(), "layers": layers_of(run), "weights": model.whole}


def work() -> dict[str, Any]:
    found: dict[Any, Any] = {(*run, measured): train(*run, measured) for run in RUNS for measured in (True, False)}
    for name in ASKED:
        found[name, True], found[name, False] = ask(name), ask(name, measured=False)
        if "flat" not in name:
            ask(name, steps=HALF, end=f"{name}.ckpt")
            found[name, "resumed"] = ask(name, start=f"{name}.ckpt")
    return found


if __name__ == "__main__":
    take_part(RANKS, work)
