"""One of two processes that train one model, and resume a run from its folder of shards, in the named `RUNS`."""

import sys

from lightning_lowbit import CrashSafeCheckpoint, WeightDecaySwitch
from lightning_lowbit.distributed import replicas_of
from tests.lightning_imports import Callback
from tests.optim.ranks_lightning import Regression, plugin
from tests.ranks import RANKS, STRATEGIES, trainer

# Strategy, optimizer, callbacks. FSDP1 leaves a rank that holds nothing of a parameter without scalars of its state.
RUNS = {
    "fsdp1, stable_spam": ("fsdp1", "stable_spam", list),
    "fsdp1, adaptive": ("fsdp1", "adaptive", list),
    "ddp, muon": ("ddp", "muon", list),
    "fsdp2, muon": ("fsdp2", "muon", list),
    "fsdp2, stable_spam": ("fsdp2", "stable_spam", lambda: [WeightDecaySwitch(0.0, step=2)]),
}


class Statistics(Callback):
    """Those of all gradients in the last step."""

    def on_train_end(self, trainer, *_):
        optimizer = trainer.strategy.optimizers[0]
        self.last = [list(map(float, one)) for one in optimizer.gradient_statistics().values()]
        self.decays = [group["weight_decay"] for group in optimizer.param_groups]
        self.knows_replicas = replicas_of(optimizer.param_groups[0]["params"]) is not None


def train(strategy, optimizer, *callbacks, ckpt_path=None):
    model, statistics = Regression(optimizer, strategy == "fsdp2"), Statistics()
    options = {"max_steps": 6, "devices": RANKS, "strategy": STRATEGIES[strategy](), "enable_checkpointing": True}
    trainer(plugin(), callbacks=[*callbacks, statistics], **options).fit(model, ckpt_path=ckpt_path)
    return {
        "weights": model.whole,
        "statistics": statistics.last,
        "decays": statistics.decays,
        "knows replicas": statistics.knows_replicas,
    }


def work():
    results = {}
    for name in sys.argv[3:]:
        strategy, optimizer, callbacks = RUNS[name]
        folder = f"{sys.argv[2]}/{name}"
        save = CrashSafeCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        whole = train(strategy, optimizer, *callbacks(), save)
        results[name] = whole, train(strategy, optimizer, *callbacks(), ckpt_path=f"{folder}/step=3.ckpt")
    return results
