"""One of two processes that train one model, each on its own data."""

import sys
from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit import FP8Precision, LowBitPrecision
from tests.precision.regression_model import Regression, Witness, flat, state, trainer

RANKS, STEPS, HISTORY, ACCUMULATE = 2, 4, 3, 2
SMOOTHINGS = (None, "channel")

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
    model, made = Regression(), both(plugin, limit_val_batches=2)
    with Collectives() as training:
        made.fit(model)
    with Collectives() as evaluation:
        made.validate(model, verbose=False)
    return {"training": dict(training.counts), "evaluation": dict(evaluation.counts)}


def work():
    return {
        "histories": {str(smooth): histories(smooth) for smooth in SMOOTHINGS},
        "collectives": {name: collectives(COUNTED[name]()) for name in ("without the plugin", *sys.argv[3:])},
    }
