"""One of two processes that train one model and switch.

Ranks see different numbers of tokens.
"""

import warnings

from lightning_lowbit import LowBitPrecision, PrecisionSwitch, QAFSwitch
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from tests.lightning_imports import Callback
from tests.optim.ranks_lightning import Regression
from tests.ranks import RANKS, STRATEGIES, trainer

STEPS, TOKENS = 9, 200
OF_RANK = [40, 5]  # tokens in a step
RESUMED = [4, 5, 6]  # before the switch, at it and after it


class Witness(Callback):
    """Step, phase, and the casts of both layers; a checkpoint after some steps, if it shall."""

    def __init__(self, path):
        self.path = path
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, *_):
        casts = [str(m.full_casts) for m in pl_module.modules() if isinstance(m, QuantizedLayer)]
        self.seen.append([trainer.global_step, trainer.precision_plugin.phase, *casts])

    def on_train_batch_end(self, trainer, *_):
        if self.path is not None and trainer.global_step in RESUMED:
            trainer.save_checkpoint(f"{self.path} {trainer.global_step}.ckpt")


def train(strategy, path=None, ckpt_path=None):
    model, witness = Regression("stable_spam", shard=strategy == "fsdp2"), Witness(path)

    def count(batch):
        return OF_RANK[model.global_rank]

    first = PrecisionSwitch({r"body\.0": "mxfp4"}, tokens=TOKENS, count=count, rewarm=3, moments="reset")
    run = trainer(
        LowBitPrecision("nvfp4", compute_dtype="fp32"),
        max_steps=STEPS,
        devices=RANKS,
        strategy=STRATEGIES[strategy](),
        callbacks=[first, QAFSwitch(tokens=TOKENS, count=count), witness],
    )
    run.fit(model, ckpt_path=ckpt_path)
    return {"seen": witness.seen, "weights": model.whole, "record": first._record}


def work():
    results = {}
    for strategy in ("ddp", "fsdp2"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            results[strategy] = train(strategy, strategy)
            results[strategy]["resumed"] = {
                step: train(strategy, ckpt_path=f"{strategy} {step}.ckpt")["weights"] for step in RESUMED
            }
    return results
