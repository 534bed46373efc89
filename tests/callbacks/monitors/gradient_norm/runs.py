"""A model whose gradient norms are known, and runs of it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from lightning_lowbit import GradientNormMonitor
from lightning_lowbit.optim import Adaptive, StableSPAM
from tests.lightning_imports import (
    BoringModel,
    Callback,
    RandomDataset,
    TensorBoardLogger,
    Trainer,
    quiet_trainer,
)

# Norms of sums: the same squares in another order and rounded some five times more, in float32 (2^-24 = 6e-8 each).
CLOSE = {"rtol": 1e-6, "atol": 0.0}


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3)


class Planned(BoringModel):
    """The loss, and so the gradient, of some batches is multiplied; what torch says of the norms is kept.

    Attributes:
        seen: by optimizer step, before clipping and at the end of the batch.
    """

    def __init__(
        self, factors: Mapping[int, float] | None = None, make_optimizer: Callable[[nn.Module], Any] = sgd
    ) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2))
        self.factors, self.make_optimizer = factors or {}, make_optimizer
        self.seen: dict[int, dict[str, float]] = {}

    def norm(self, module: nn.Module) -> float:
        return float(get_total_norm([p.grad.float() for p in module.parameters() if p.grad is not None]))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        factor = self.factors.get(self.trainer.fit_loop.epoch_loop.total_batch_idx, 1.0)
        return self.layer(batch).float().square().mean() * factor

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        found = {"unclipped": self.norm(self), **{f"unclipped/layer.{i}": self.norm(self.layer[i]) for i in (0, 1)}}
        self.seen[self.trainer.global_step + 1] = found

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step in self.seen:
            found = {"clipped": self.norm(self), **{f"clipped/layer.{i}": self.norm(self.layer[i]) for i in (0, 1)}}
            self.seen[self.trainer.global_step] |= found

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)

    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(5)
        return DataLoader(RandomDataset(32, 64))


def trainer(*callbacks: Callback, **kwargs: Any) -> Trainer:
    defaults = {"max_steps": 6, "log_every_n_steps": 1, "limit_val_batches": 0}
    return quiet_trainer(callbacks=list(callbacks), **{**defaults, **kwargs})


def logged(run: Trainer) -> dict[int, dict[str, float]]:
    """What the event file holds, by optimizer step (Lightning numbers the first one 0)."""
    assert run.logger is not None
    run.logger.finalize("success")
    events = EventAccumulator(run.logger.log_dir).Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag) if tag != "epoch" else ():
            name = tag.removeprefix("grad_norm/")
            assert name not in found.setdefault(event.step + 1, {}), f"{name} twice in step {event.step + 1}"
            found[event.step + 1][name] = event.value
    return found


def fit(model: Planned, monitor: GradientNormMonitor | None = None, **kwargs: Any) -> dict[int, dict[str, float]]:
    """What is logged of a run."""
    run = trainer(monitor or GradientNormMonitor([r"layer\.\d"]), logger=TensorBoardLogger("."), **kwargs)
    run.fit(model)
    return logged(run)


def assert_same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for step in wanted:
        assert found[step].keys() == wanted[step].keys(), f"step {step}"
        for name, value in wanted[step].items():
            message = f"step {step}, {name}: {found[step][name]}, wanted {value}"
            torch.testing.assert_close(found[step][name], value, **CLOSE, equal_nan=True, msg=message)


RULES: dict[str, Callable[[nn.Module], Any]] = {
    "Stable-SPAM": lambda module: StableSPAM(module.parameters(), lr=1e-3),
    "matrices only": lambda module: StableSPAM(module.parameters(), lr=1e-3, matrices_only=True),
    "wrapped": lambda module: Adaptive(torch.optim.AdamW(module.parameters())),
    "without rules": lambda module: StableSPAM(module.parameters(), lr=1e-3, element_clip=None, norm_clip=None),
}


class Constant(Planned):
    """The norm of the gradient is the factor of the batch, but for rounding."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        factor = self.factors.get(self.trainer.fit_loop.epoch_loop.total_batch_idx, 1.0)
        return self.layer[0].bias.sum() * factor / 2  # four elements


def spikes_of(
    factors: Mapping[int, float], monitor: GradientNormMonitor, steps: int = 20, **kwargs: Any
) -> list[tuple[float, ...]]:
    trainer(monitor, max_steps=steps, **kwargs).fit(Constant(factors))
    return [tuple(round(value, 4) for value in spike) for spike in monitor.state_dict()["spikes"]]


SAID = "Gradient norm, step {}: it is {} before clipping, where its running mean is {}"
