"""Models in fp16 whose gradients overflow or vanish, and runs of them."""

import math
from copy import deepcopy

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from lightning_lowbit import ConservativeGradScaler, LowBitPrecision, StaticGradScaler
from tests.lightning_imports import Callback
from tests.precision.regression_model import Regression, fitted, flat, state

#: A scale that moves within a few steps; a power of two at any time, which changes no digit of a gradient.
MOVING = {"init_scale": 2.0**10, "growth_factor": 2.0, "growth_interval": 2}


def fp16(scaler=None, casts="bf16"):
    """Only fp16: there are no casts."""
    return LowBitPrecision(casts, compute_dtype="fp16", scaler=scaler)


def moving(**kwargs):
    return ConservativeGradScaler(device="cpu", **{**MOVING, **kwargs})


def static(scale=2.0**10):
    return StaticGradScaler(scale, device="cpu")


class Overflowing(Regression):
    """Has gradients that are not finite from the first micro-batch of some steps on.

    Args:
        at: which steps.
        by: ``"loss"``: it is infinite; ``"activations"``: they exceed 65504, and no other dtype would mind.
        make: the optimizer, from the parameters; None for Adam.
        schedule: makes a schedule of the learning rate, which falls to a half each step.
    """

    def __init__(self, at=(), by="loss", make=None, schedule=False):
        super().__init__()
        self.at, self.by, self.make, self.schedule = at, by, make, schedule

    def loss(self, seed, size):
        if not self.training or seed % 8 or self.trainer.global_step not in self.at:
            return super().loss(seed, size)
        return super().loss(seed, 1e6) if self.by == "activations" else super().loss(seed, size) * math.inf

    def configure_optimizers(self):
        optimizer = super().configure_optimizers() if self.make is None else self.make(self.parameters())
        if not self.schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Steps(Callback):
    """What came of each optimizer step.

    Attributes:
        scalers: states of the scaler.
        weights: all of them.
        optimizers: states of the first optimizer.
        gradients: as hooks see them, before clipping.
        clipped: as the steps of the first optimizer get them.
        saved: what the plugin would put into a checkpoint, if it is one of this package.
    """

    def __init__(self):
        self.scalers, self.weights, self.optimizers = [], [], []
        self.gradients, self.clipped, self.saved = [], [], []

    @property
    def scales(self):
        return [scaler["scale"] for scaler in self.scalers]

    def on_fit_start(self, trainer, pl_module):
        trainer.optimizers[0].register_step_pre_hook(lambda *_: self.clipped.append(gradients(pl_module)))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(gradients(pl_module))

    def on_train_batch_end(self, trainer, pl_module, *_):
        if len(self.scalers) == trainer.global_step:  # in the midst of accumulation
            return
        self.weights.append(flat(pl_module))
        self.optimizers.append(deepcopy(trainer.optimizers[0].state_dict()))
        plugin = trainer.precision_plugin
        self.scalers.append({} if plugin.scaler is None else plugin.scaler.state_dict())
        if isinstance(plugin, LowBitPrecision):
            self.saved.append(state(plugin))


def gradients(model):
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found).clone() if found else torch.zeros(0)


def train(plugin, model=None, steps=8, **kwargs):
    seen = Steps()
    batches = steps * kwargs.get("accumulate_grad_batches", 1)
    made = fitted(plugin, model, max_steps=steps, limit_train_batches=batches, callbacks=[seen], **kwargs)
    assert made.global_step == len(seen.scalers) == steps, "the run has not the length that it was given"
    return seen


def assert_same(found, expected, place="it"):
    """Equal to the bit, tensors within mappings and lists too."""
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected), f"{place} differs"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{place} has other parts"
        for key in expected:
            assert_same(found[key], expected[key], f"{place}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{place} has another length"
        for i, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{place}/{i}")
    else:
        assert found == expected, f"{place} is {found}, not {expected}"


OVERFLOWS = (3, 5)

SCALERS = {
    "conservative": lambda: moving(growth_interval=3, hysteresis=2, cooldown=1),
    "torch's": lambda: GradScaler("cpu", **MOVING),
}


def run(plugin, steps, model=None, **kwargs):
    made = fitted(plugin, model or Overflowing(OVERFLOWS), max_steps=steps, limit_train_batches=1, **kwargs)
    made.save_checkpoint("x.ckpt")
    return made.lightning_module


def checkpoint():
    return torch.load("x.ckpt", weights_only=True)
