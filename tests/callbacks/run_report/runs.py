"""Runs with a report, and what it holds."""

import json
from pathlib import Path

import torch

from lightning_lowbit import FP4Precision
from lightning_lowbit.callbacks.run_report import RunReport
from tests.lightning_imports import BoringModel, Checkpoint, quiet_trainer
from tests.report.test_html import EVIL, check_self_contained


class Known(BoringModel):
    """Logs values that say in which optimizer step they were logged: the k-th step logs k."""

    def __init__(self, lr=1.0, fail_at=None, error=RuntimeError):
        super().__init__()
        self.save_hyperparameters(ignore="error")
        self.lr, self.fail_at, self.error = lr, fail_at, error

    def training_step(self, batch, batch_idx):
        self.k = self.trainer.global_step + 1
        if self.k == self.fail_at:
            raise self.error(EVIL)
        self.log("loss", torch.tensor(float(self.k)), on_step=True, on_epoch=True)
        self.log("epoch_only", torch.tensor(float(self.k)), on_step=False, on_epoch=True, reduce_fx="max")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.log("grad_norm", torch.tensor(float(self.k)))

    def on_train_batch_end(self, *_):
        self.log("tokens/s", torch.tensor(100.0 * self.k))  # after the callbacks' hooks of this name

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(1.0 + abs(self.trainer.global_step - 4)))
        self.log("val_acc", torch.tensor(0.1))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr * 1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: done + 1)  # step k has k·lr·1e-3
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer(*callbacks, report=None, **kwargs):
    defaults = {
        "max_steps": 6,
        "log_every_n_steps": 1,
        "limit_val_batches": 1,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "plugins": [FP4Precision(quantize_output=True)],
    }
    return quiet_trainer(callbacks=[*callbacks, report or RunReport()], **{**defaults, **kwargs})


def load(folder="."):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((Path(folder) / "run.json").read_text(), parse_constant=refuse)


def page(folder="."):
    """The text of a page, and its source."""
    source = (Path(folder) / "report.html").read_text()
    return check_self_contained(source).text, source


def both(model=None, *callbacks, **kwargs):
    """The file and the text of the page of a run in the current folder."""
    trainer(*callbacks, **kwargs).fit(model or Known())
    return load(), page()[0]


def steps(run, name):
    return [step for step, _ in run["history"][name]]
