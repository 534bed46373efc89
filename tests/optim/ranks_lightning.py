"""One of two processes that train one model through Lightning."""

import torch

from lightning_lowbit import LowBitPrecision
from lightning_lowbit.optim import Adaptive, LowBitAdamW, StableSPAM
from tests import ranks
from tests.ranks import RANKS, trainer

STEPS, HALF = 8, 4

OPTIMIZERS = {
    "stable_spam": lambda p: StableSPAM(p, reset_interval=5, weight_decay=0.1),
    "adaptive": lambda p: Adaptive(torch.optim.AdamW(p)),
    "fp8": lambda p: LowBitAdamW(p),
}


class Regression(ranks.Regression):
    """With one of the ``OPTIMIZERS``. One batch has large inputs."""

    def __init__(self, name, shard=False):
        super().__init__(shard)
        self.name = name

    def inputs(self, step, batch_idx):
        x, y = super().inputs(step, batch_idx)
        return (20.0 if step == 3 else 1.0) * x, y

    def configure_optimizers(self):
        return OPTIMIZERS[self.name](self.trainer.model.parameters())


STRATEGIES = {name: ranks.STRATEGIES[name] for name in ("ddp", "fsdp2", "fsdp2, whole checkpoints", "fsdp1")}

# Of strategy and optimizer, and with or without a plugin, which FSDP1 cannot do without.
RUNS = [
    *((strategy, optimizer, False) for strategy in ("ddp", "fsdp2") for optimizer in OPTIMIZERS),
    *((strategy, "adaptive", True) for strategy in ("ddp", "fsdp2", "fsdp1")),
]
INTERRUPTED = [
    *((strategy, optimizer) for strategy in STRATEGIES for optimizer in ("stable_spam", "fp8") if strategy != "fsdp1"),
    ("fsdp1", "stable_spam"),  # no rank holds rows, which moments in FP8 need
]


def describe(strategy, optimizer, with_plugin):
    return f"{strategy}, {optimizer}, {'with' if with_plugin else 'without'} plugin"


def plugin():
    """Without a cast."""
    return LowBitPrecision("bf16", compute_dtype="fp32")


def alone(name, ckpt_path=None):
    """Weights at the end of a run in one process."""
    model = Regression(name)
    trainer(plugin(), max_steps=STEPS, devices=1).fit(model, ckpt_path=ckpt_path)
    return model.whole


def train(strategy, optimizer, with_plugin, end=STEPS, ckpt_path=None):
    """A Trainer of both ranks that has trained, and the weights."""
    model = Regression(optimizer, shard=strategy.startswith("fsdp2"))
    plugins = [plugin()] if with_plugin else []
    run = trainer(*plugins, max_steps=end, devices=RANKS, strategy=STRATEGIES[strategy]())
    run.fit(model, ckpt_path=ckpt_path)
    return run, model.whole


def work():
    results = {
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
