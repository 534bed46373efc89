"""One of two processes that train a watched model."""

import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from lightning_lowbit import GradientNormMonitor, LowBitPrecision
from lightning_lowbit.optim import StableSPAM
from tests import ranks
from tests.lightning_imports import Callback
from tests.ranks import RANKS, STRATEGIES

STEPS, EVERY = 6, 2
LAYERS = ["body"]

# Of strategy, optimizer, and with a plugin or without: with one, FSDP1 clips by norm, too.
NAMES = ("ddp", "fsdp1", "fsdp2")
RUNS = [(name, optimizer, optimizer == "sgd") for name in NAMES for optimizer in ("sgd", "stable_spam")]
RUNS[RUNS.index(("fsdp1", "stable_spam", False))] = ("fsdp1", "stable_spam", True)
UNPLUGGED = ("fsdp1", "sgd", False)


class Regression(ranks.Regression):
    """Three layers, the second with fewer rows than ranks, so that a rank has nothing of it, and one that is not
    trained."""

    loss_scale = 3.0

    def __init__(self, optimizer, shard=False):
        super().__init__(shard)
        self.optimizer = optimizer

    def build(self):
        self.body = nn.Sequential(nn.Linear(16, 9), nn.Linear(9, 1), nn.Linear(1, 3))
        self.frozen = nn.Linear(3, 1).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.body(x))

    def configure_optimizers(self):
        parameters = self.trainer.model.parameters()
        return torch.optim.SGD(parameters, lr=0.05) if self.optimizer == "sgd" else StableSPAM(parameters, lr=1e-3)


class Watched(GradientNormMonitor):
    """Counts the collectives of each step."""

    def __init__(self):
        super().__init__(LAYERS, every_n_steps=EVERY)
        self.collectives = []

    def on_before_optimizer_step(self, *arguments):
        with CommDebugMode() as seen:
            super().on_before_optimizer_step(*arguments)
        self.collectives.append(seen.get_total_counts())

    def on_train_batch_end(self, *arguments):
        with CommDebugMode() as seen:
            super().on_train_batch_end(*arguments)
        self.collectives[-1] += seen.get_total_counts()


class Curves(Callback):
    """What was logged, by step."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, *_):
        norms = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("grad_norm")}
        if norms and trainer._logger_connector.should_update_logs:
            self.seen[trainer.global_step] = norms


def train(strategy, optimizer, with_plugin, shard=False, **kwargs):
    """Curves by step, and collectives by step."""
    monitor, curves = Watched(), Curves()
    trainer = ranks.trainer(
        *([LowBitPrecision("bf16", compute_dtype="fp32")] if with_plugin else []),
        strategy=strategy,
        callbacks=[monitor, curves],
        gradient_clip_val=0.5 if with_plugin else None,
        max_steps=STEPS,
        log_every_n_steps=EVERY,
        **kwargs,
    )
    trainer.fit(Regression(optimizer, shard))
    return {"curves": curves.seen, "collectives": monitor.collectives}


def work():
    return {
        run: train(STRATEGIES[run[0]](), *run[1:], shard=run[0] == "fsdp2", devices=RANKS) for run in [*RUNS, UNPLUGGED]
    }
