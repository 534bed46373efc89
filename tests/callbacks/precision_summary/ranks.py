"""One of two processes that train a model whose layers are tabulated."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import LowBitPrecision, OutlierMonitor, PrecisionSummary
from tests import ranks
from tests.callbacks.precision_summary.runs import sections_of
from tests.ranks import RANKS, STRATEGIES


class Regression(ranks.Regression):
    """A layer of each order in which weights are stored."""

    shape = (8, 16, 4)

    def build(self):
        self.body = nn.Sequential(
            nn.Linear(16, 32), Conv1D(24, 32), nn.Unflatten(1, (4, 6)), nn.Conv1d(4, 6, 3, groups=2), nn.Flatten(),
            nn.Linear(24, 4),
        )  # fmt: skip

    def configure_optimizers(self):
        return torch.optim.SGD(self.trainer.model.parameters(), lr=1e-3)


RUNS = [("ddp", True), ("fsdp1", True), ("fsdp1", False), ("fsdp1, flat", False)]


def summary(strategy, with_plugin):
    """Of a run: layers, the tables of its page, and the curves of the layers' inputs."""
    alone = strategy == "one"
    plugins = [LowBitPrecision("fp8-current", compute_dtype="fp32", save="codes")] if with_plugin else []
    run = ranks.trainer(
        *plugins,
        devices=1 if alone else RANKS,
        strategy="auto" if alone else STRATEGIES[strategy](),
        callbacks=[counted := PrecisionSummary(quiet=True), OutlierMonitor(layers=["body"])],
        max_steps=2,
        log_every_n_steps=1,
    )
    run.fit(Regression())
    outliers = {name for name in run.callback_metrics if name.startswith("outliers")}
    return {
        "layers": counted.report_data(run)["layers"],
        "tables": sections_of(counted, run).partition("Coverage")[0],  # a process counts the FLOPs of its rows
        "outliers": outliers,
    }


def work():
    return {run: summary(*run) for run in RUNS}
