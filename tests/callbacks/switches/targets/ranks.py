"""One of two processes that train one model and switch.

Ranks see different numbers of tokens.
"""

import warnings

from lightning_lowbit import LowBitPrecision, PrecisionSwitch, QAFSwitch
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from tests.lightning_imports import Callback
from tests.optim.ranks_lightning import Regression
from tests.ranks import RANKS, STRATEGIES, trainer

STEPS, TOKENS = 7, 120
OF_RANK = [40, 5]  # tokens in a step
RESUMED = {"ddp": [4], "fsdp2": [2]}  # after the switch and before it


class Witness(Callback):
    """Step, phase, and the casts of both layers; checkpoints after some steps."""

    def __init__(self, path, saves):
        self.path, self.saves = path, saves
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, *_):
        casts = [str(m.full_casts) for m in pl_module.modules() if isinstance(m, QuantizedLayer)]
        self.seen.append([trainer.global_step, trainer.precision_plugin.phase, *casts])

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in self.saves:
            trainer.save_checkpoint(f"{self.path} {trainer.global_step}.ckpt")


def train(strategy, saves=(), ckpt_path=None):
    model, witness = Regression("stable_spam", shard=strategy == "fsdp2"), Witness(strategy, saves)

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
    for strategy, steps in RESUMED.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            results[strategy] = train(strategy, steps)
            results[strategy]["resumed"] = {
                step: train(strategy, ckpt_path=f"{strategy} {step}.ckpt")["weights"] for step in steps
            }
    return results
