"""One of two processes that train a model whose noise is measured."""

import torch
from torch import nn

from lightning_lowbit import Cast, GradientNoiseMonitor, LinearCasts, LowBitPrecision
from tests import ranks
from tests.ranks import RANKS, STRATEGIES

STEPS = 3

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


class Regression(ranks.Regression):
    """Batches follow from the micro-batch, too.

    One layer has fewer rows than ranks, so that a rank has nothing of it; one is in FSDP2's root, which has whole
    parameters between the passes; and one may be there that no loss depends on.
    """

    shape = (32, 16, 1)
    loss_scale = 3.0

    def __init__(self, dropout=0.0, shard=False, unused=False):
        self.dropout, self.unused_too = dropout, unused
        super().__init__(shard)

    def build(self):
        self.first = nn.Linear(16, 40)
        self.body = nn.Sequential(nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(40, 24), nn.Linear(24, 1))
        self.unused = nn.Linear(3, 3) if self.unused_too else None

    def forward(self, x):
        return self.body(self.first(x))

    def inputs(self, step, batch_idx):
        return super().inputs(100 * step + batch_idx % self.trainer.accumulate_grad_batches, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.02, momentum=0.5)


def trainer(name, casts, *callbacks, **kwargs):
    """Without a strategy in one process."""
    return ranks.trainer(
        LowBitPrecision(CASTS[casts], compute_dtype="bf16" if casts == "nearest" else "fp32", seed=5),
        strategy=STRATEGIES[name]() if name in STRATEGIES else "auto",
        devices=RANKS if name in STRATEGIES else 1,
        callbacks=list(callbacks),
        **{"max_steps": STEPS, "log_every_n_steps": 1, **kwargs},
    )


def results_of(monitor, run, model):
    """Measurements, what was logged of layers and of all together, and weights at the end."""
    layers = {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("gradient")}
    return {"measurements": monitor.measurements(), "layers": layers, "weights": model.whole}


def train(name, casts, micro, measured=True):
    """Results by two draws, and the next random numbers."""
    monitor = GradientNoiseMonitor(1, average=1, layers=["first", r"body\.\d"])
    run = trainer(name, casts, *([monitor] if measured else []), accumulate_grad_batches=micro)
    model = Regression(0.0 if casts == "weight" else 0.2, name == "fsdp2", "unused" in name)
    torch.manual_seed(1 + run.global_rank)
    run.fit(model)
    return {**results_of(monitor, run, model), "random": torch.rand(4)}


def ask(name, measured=True):
    """Results by layers."""
    monitor = GradientNoiseMonitor(1, kind="layers", average=STEPS, layers=["first", r"body\.\d"])
    run = trainer(name, "everything", *([monitor] if measured else []), limit_train_batches=1)
    model = Regression(shard=name == "fsdp2")
    torch.manual_seed(1)
    run.fit(model)
    return results_of(monitor, run, model)


def work():
    found = {(*run, measured): train(*run, measured) for run in RUNS for measured in (True, False)}
    for name in ASKED:
        found[name, True], found[name, False] = ask(name), ask(name, measured=False)
    return found
