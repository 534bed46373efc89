"""A model with planted outliers, and runs of it."""

from collections.abc import Callable
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lowbit import OutlierMonitor
from tests.callbacks.monitors.outliers.ranks import MLP
from tests.lightning_imports import (
    Callback,
    LightningModule,
    TensorBoardLogger,
    Trainer,
    quiet_trainer,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-7}  # sums of float32 in another order


LAYERS = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "lm_head"]


class Model(LightningModule):
    """Learns from batches that follow from their number; those that are planned hold an outlier in channel 5."""

    def __init__(self, planned: dict[int, float] | None = None, wrap: Callable[..., Any] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.mlp, self.lm_head = MLP(16, 12), nn.Linear(16, 4)
        self.planned, self.wrap = planned or {}, wrap
        self.seen: dict[int, list[Tensor]] = {}  # what enters the MLP, by optimizer step

    def batch(self, number: int) -> Tensor:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        x[3, 5] = self.planned.get(number, x[3, 5].item())
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(x + (self.wrap(self.mlp, x) if self.wrap else self.mlp(x)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.batch(self.trainer.fit_loop.epoch_loop.total_batch_idx)
        self.seen.setdefault(self.trainer.global_step + 1, []).append(x)
        return self(x).float().square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(torch.full((4, 16), 1000.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(256))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(range(2))


def trainer(*callbacks: Callback, **kwargs: Any) -> Trainer:
    defaults = {"max_steps": 6, "log_every_n_steps": 1, "limit_val_batches": 0}
    return quiet_trainer(callbacks=list(callbacks), **{**defaults, **kwargs})


def logged(run: Trainer) -> dict[int, dict[str, float]]:
    """What the event file holds of layers and MLPs, by optimizer step (Lightning numbers the first one 0)."""
    assert run.logger is not None
    run.logger.finalize("success")
    events = EventAccumulator(run.logger.log_dir).Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag) if "/" in tag else ():
            assert tag not in found.setdefault(event.step + 1, {}), f"{tag} twice in step {event.step + 1}"
            found[event.step + 1][tag] = event.value
    return found


def fit(model: LightningModule, monitor: OutlierMonitor | None = None, **kwargs: Any) -> dict[int, dict[str, float]]:
    run = trainer(monitor or OutlierMonitor(), logger=TensorBoardLogger("."), **kwargs)
    run.fit(model)
    return logged(run)


def assert_same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for step in wanted:
        assert found[step].keys() == wanted[step].keys(), f"step {step}"
        for name, value in wanted[step].items():
            message = f"step {step}, {name}: {found[step][name]}, wanted {value}"
            torch.testing.assert_close(found[step][name], value, **CLOSE, equal_nan=True, msg=message)
