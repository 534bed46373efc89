"""Runs whose loss scale is monitored."""

import math

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lightning_lowbit import ConservativeGradScaler, LossScaleMonitor, LowBitPrecision, StaticGradScaler
from tests.callbacks.monitors.said import alerts_said
from tests.lightning_imports import BoringModel, MixedPrecision, quiet_trainer


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=1e-3)


class Scripted(BoringModel):
    """Gradients overflow in some batches; after each batch with a step, what the scaler says is kept."""

    def __init__(self, overflows=(), make_optimizer=sgd):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2))
        self.overflows = {(batch, 0) for batch in overflows}  # the number is of the optimizer
        self.make_optimizer = make_optimizer
        self.seen, self.steps = [], 0
        self.skip = set()  # which optimizers, in the step under way

    def mean(self, batch, optimizer=0):
        mean = self.layer(batch).float().mean()
        if (self.trainer.fit_loop.epoch_loop.total_batch_idx, optimizer) in self.overflows:
            self.skip.add(optimizer)
            return mean * math.inf
        return mean

    def training_step(self, batch, batch_idx):
        return self.mean(batch)

    def on_train_batch_end(self, *_):
        if self.trainer.global_step == self.steps:  # gradients are being accumulated
            return
        scaler = self.trainer.precision_plugin.scaler
        scale, tracker = scaler.get_scale(), scaler._get_growth_tracker()
        self.seen.append({"scale": scale, "growth_tracker": tracker, "overflows": len(self.skip)})
        self.steps, self.skip = self.trainer.global_step, set()

    def configure_optimizers(self):
        return self.make_optimizer(self)


def conservative(**kwargs):
    settings = {"init_scale": 2.0**10, "growth_interval": 3, "cooldown": 1, "device": "cpu"}
    return ConservativeGradScaler(**{**settings, **kwargs})


def torchs(**kwargs):
    return GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 3, **kwargs})


def lowbit(scaler):
    return LowBitPrecision("bf16", compute_dtype="fp16", scaler=scaler)


def mixed(scaler):
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


PLUGINS = {
    "conservative": lambda: lowbit(conservative()),
    "tolerant": lambda: lowbit(conservative(hysteresis=2)),
    "torch's": lambda: lowbit(torchs()),
    "static": lambda: lowbit(StaticGradScaler(2.0**10, device="cpu")),
    "Lightning's, conservative": lambda: mixed(conservative(hysteresis=2)),
    "Lightning's, torch's": lambda: mixed(torchs()),
}


def trainer(*callbacks, plugin=None, **kwargs):
    defaults = {"max_steps": 8, "log_every_n_steps": 1, "limit_val_batches": 0}
    plugins = {"plugins": [lowbit(conservative()) if plugin is None else plugin]}
    return quiet_trainer(callbacks=list(callbacks), **{**defaults, **plugins, **kwargs})


def silent(scaler, overflows, plugin=lowbit, **kwargs):
    """A run warns of nothing: warnings are errors."""
    settings = {name: kwargs.pop(name) for name in ("falls", "within") if name in kwargs}
    trainer(LossScaleMonitor(**settings), plugin=plugin(scaler), **kwargs).fit(Scripted(overflows))


def warned(match, *arguments, **kwargs):
    """A run warns of the scale once, and of nothing else."""
    with alerts_said() as said:
        silent(*arguments, **kwargs)
    (text,) = said
    assert text.startswith(match), text


FALLS = {"falls": 3, "within": 6}
