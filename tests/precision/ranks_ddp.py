"""One of two processes that train one model, each on its own data."""

import sys
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit import FP8Precision, IntegerPrecision, LowBitPrecision, TernaryPrecision
from tests.lightning_imports import Callback
from tests.precision.regression_model import Ramp, Regression, Witness, flat, state, trainer

RANKS, STEPS, HISTORY, ACCUMULATE = 2, 4, 3, 2
SMOOTHINGS = (None, "channel")

QAT = {
    "ternary": lambda: TernaryPrecision(quantize_output=True),
    "integers": lambda: IntegerPrecision(4, 8, group=8, activation_group="row"),
}

# Runs whose collectives are counted. Those with histories have one more in each step than one without the plugin, and
# "auto" would have one in all.
COUNTED = {
    "without the plugin": lambda: None,
    "bf16": lambda: LowBitPrecision("bf16", compute_dtype="bf16"),
    "current": lambda: FP8Precision("current", compute_dtype="bf16"),
    "current, tokens smoothed": lambda: FP8Precision("current", compute_dtype="bf16", smooth_swiglu="token"),
    "mx": lambda: FP8Precision("mx", compute_dtype="bf16"),
    "current, channels smoothed": lambda: FP8Precision("current", compute_dtype="bf16", smooth_swiglu="channel"),
    "delayed": lambda: FP8Precision("delayed", compute_dtype="bf16"),
    "delayed, channels smoothed": lambda: FP8Precision("delayed", compute_dtype="bf16", smooth_swiglu="channel"),
    "delayed, tokens smoothed": lambda: FP8Precision("delayed", compute_dtype="bf16", smooth_swiglu="token"),
}


def both(plugin, **kwargs):
    """A Trainer of all ranks."""
    defaults = {
        "devices": RANKS,
        "strategy": "ddp",
        "use_distributed_sampler": False,
        "max_steps": STEPS,
        "accumulate_grad_batches": ACCUMULATE,
        "limit_train_batches": STEPS * ACCUMULATE,
        "num_sanity_val_steps": 0,
    }
    return trainer(plugin, **{**defaults, **kwargs})


def histories(smooth):
    """A run with validation between micro-batches, and what a witness on this rank saw."""
    model, witness = Regression(val_size=100.0), Witness()
    plugin = FP8Precision(history=HISTORY, smooth_swiglu=smooth, compute_dtype="fp32")
    both(plugin, callbacks=[witness], val_check_interval=3, limit_val_batches=1).fit(model)
    return {
        "state": state(plugin),
        "weights": flat(model),
        "validated": len(model.val_losses),
        "steps": witness.steps,
        "channels": witness.channels,
        "in_force": dict(witness.in_force),
    }


class Collectives(TorchDispatchMode):
    """Counts collectives, also those that DDP starts from C++ in the backward pass."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def collectives(plugin):
    """Of a training run, and of evaluating it."""
    model, made = Regression(), both(plugin, limit_val_batches=2)
    with Collectives() as training:
        made.fit(model)
    with Collectives() as evaluation:
        made.validate(model, verbose=False)
    return {"training": dict(training.counts), "evaluation": dict(evaluation.counts)}


class Keep(Callback):
    """A checkpoint of each step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % ACCUMULATE == 0:
            trainer.save_checkpoint(f"{trainer.global_step}.ckpt")


def run(ckpt_path=None, **kwargs):
    """A run that keeps its checkpoints, or one that goes on from one of them."""
    model, plugin = Regression(), FP8Precision(history=HISTORY, smooth_swiglu="channel", **kwargs)
    both(plugin, callbacks=[] if ckpt_path else [Keep()]).fit(model, ckpt_path=ckpt_path)
    return {"losses": torch.stack(model.losses), "weights": flat(model), "state": state(plugin)}


def progressive(plugin):
    """A run in which λ rises."""
    model = Regression()
    both(plugin, callbacks=[Ramp(0.0, 0.25, 0.5)]).fit(model)
    return {"losses": torch.stack(model.losses), "weights": flat(model), "state": state(plugin)}


def work():
    return {
        "histories": {str(smooth): histories(smooth) for smooth in SMOOTHINGS},
        "collectives": {name: collectives(COUNTED[name]()) for name in ("without the plugin", *sys.argv[3:])},
        "whole": run(),
        "resumed": run("2.ckpt"),
        "fresh": run("2.ckpt", fresh_histories=True),
        "qat": {name: progressive(make()) for name, make in QAT.items()},
    }
