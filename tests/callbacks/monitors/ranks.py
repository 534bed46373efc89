"""One of two processes that train a model whose gradients, and inputs of layers, are watched, in the named `RUNS`."""

import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_lowbit import GradientNormMonitor, LowBitPrecision, OutlierMonitor
from lightning_lowbit.optim import StableSPAM
from tests import ranks
from tests.lightning_imports import Callback
from tests.ranks import RANKS, STRATEGIES

STEPS, EVERY = 4, 2

# Of strategy, optimizer, and with a plugin or without: with one, FSDP1 clips by norm, too.
RUNS = [
    ("ddp", "sgd", True),
    ("ddp", "stable_spam", False),
    ("fsdp1", "sgd", True),
    ("fsdp1", "sgd", False),
    ("fsdp1", "stable_spam", True),
    ("fsdp2", "sgd", True),
    ("fsdp2", "stable_spam", False),
    ("tp", "sgd", False),
]


class MLP(nn.Module):
    """A SwiGLU."""

    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Regression(ranks.Regression):
    """Each batch has an outlier; a layer has fewer rows than ranks, so that a rank has nothing of it, and one is not
    trained."""

    shape = (32, 16, 1)
    loss_scale = 3.0

    def __init__(self, how, optimizer, hidden):
        self.hidden = hidden
        super().__init__()
        self.how, self.is_whole, self.optimizer = how, how == "tp", optimizer  # under tensor parallelism one batch

    def build(self):
        self.mlp = MLP(16, self.hidden)
        self.body = nn.Sequential(nn.Linear(16, 9), nn.Linear(9, 1), nn.Linear(1, 3))
        self.frozen = nn.Linear(3, 1).requires_grad_(False)

    def configure_model(self):
        how, self.how = self.how, ""  # it is called again
        if how == "fsdp2":
            for part in (self.mlp, self.body, self):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])
        if how == "tp":
            plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(self.mlp, self.device_mesh["tensor_parallel"], plan)

    def forward(self, x):
        return self.frozen(self.body(x + self.mlp(x)))

    def inputs(self, step, batch_idx):
        x, y = super().inputs(step, batch_idx)
        x[3, 5] = x[20, 5] = 30.0 + step  # in each half of the batch one, far from 6 times the rms of either
        return x, y

    def share(self, tensor):
        return tensor if self.is_whole else super().share(tensor)

    def configure_optimizers(self):
        parameters = [p for p in self.trainer.model.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=1e-4, foreach=False)
        return StableSPAM(parameters, lr=1e-3)


def counting(cls):
    """A monitor that counts the reductions of each step, and keeps the numbers of layers that it sends by step."""

    class Counting(cls):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.collectives, self.written, self._count = [], {}, 0

        def on_before_optimizer_step(self, *arguments):
            self._counted("on_before_optimizer_step", *arguments)

        def on_train_batch_end(self, *arguments):
            self._counted("on_train_batch_end", *arguments)
            self.collectives.append(self._count)
            self._count = 0

        def _counted(self, hook, *arguments):
            with CommDebugMode() as seen:
                getattr(super(), hook)(*arguments)
            self._count += sum(n for what, n in seen.get_comm_counts().items() if "reduce" in str(what))

        def _emit(self, numbers, step, logger_step):
            flat = {f"{quantity}/{layer}": n for quantity, row in numbers.items() for layer, n in row.items()}
            self.written[logger_step + 1] = flat

    Counting.__qualname__ = f"Counting{cls.__name__}"  # states have keys of their own
    return Counting


class Norms(Callback):
    """What was logged of norms, by step."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, *_):
        norms = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("grad_norm")}
        if norms and trainer._logger_connector.should_update_logs:
            self.seen[trainer.global_step] = norms


def train(how, optimizer, with_plugin, devices=RANKS, hidden=9, **kwargs):
    """Curves by step of norms and of outliers, and collectives by step of each monitor."""
    norm, outliers = counting(GradientNormMonitor)(["body"], every_n_steps=EVERY), counting(OutlierMonitor)(**kwargs)
    trainer = ranks.trainer(
        *([LowBitPrecision("bf16", compute_dtype="fp32")] if with_plugin else []),
        strategy=STRATEGIES[how]() if devices > 1 else "auto",
        devices=devices,
        callbacks=[norm, outliers, norms := Norms()],
        gradient_clip_val=0.5 if with_plugin else None,
        max_steps=STEPS,
        log_every_n_steps=EVERY,
    )
    trainer.fit(Regression(how if devices > 1 else "", optimizer, hidden))
    collectives = {"norm": norm.collectives, "outliers": outliers.collectives}
    return {
        "norms": norms.seen,
        "outliers": outliers.written,
        "state": outliers.state_dict(),
        "collectives": collectives,
    }


def hidden_of(run):
    return 8 if run[0] == "tp" else 9


def work():
    results = {run: train(*run, hidden=hidden_of(run)) for run in RUNS if str(run) in sys.argv[3:]}
    with warnings.catch_warnings(record=True, action="always") as said:
        train("fsdp1", "sgd", False, swiglu=True)
    results["said"] = [str(warning.message) for warning in said if "Not measured" in str(warning.message)]
    return results
