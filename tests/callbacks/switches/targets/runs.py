"""Runs of which a switch changes a part."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_lowbit import FP4Precision
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from tests.lightning_imports import Callback
from tests.precision.regression_model import Regression, trainer

Optimizer = Callable[[Any], torch.optim.Optimizer]


class Model(Regression):
    """With an optimizer of one's own, of which each step notes the learning rate; a schedule halves it in each step.

    Args:
        make: the optimizer.
    """

    def __init__(self, make=lambda p: torch.optim.Adam(p, 1e-2)):
        super().__init__()
        self.make = make
        self.rates = []

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        optimizer.register_step_post_hook(lambda *_: self.scheduled.append(self.rate(optimizer)))
        self.scheduled = []
        schedule = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def rate(self, optimizer):
        return float(optimizer.param_groups[0]["lr"])

    def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
        def noted():  # the hooks before a step have run
            loss = closure()
            self.rates.append(self.rate(optimizer.optimizer))
            return loss

        optimizer.step(closure=noted)


class Casts(Callback):
    """The casts of all layers in each step, outside the phase and in it; a checkpoint after each step, if it shall."""

    def __init__(self, keep=False):
        self.full = []
        self.phases = []
        self.keep = keep

    def on_train_batch_start(self, trainer, pl_module, *_):
        layers = {name: m for name, m in pl_module.named_modules() if isinstance(m, QuantizedLayer)}
        phase = trainer.precision_plugin.phase
        for name, layer in layers.items():
            assert layer.casts == layer.full_casts.phase(phase), f"{name} is not in phase {phase}"
        self.phases.append(phase)
        self.full.append({name: layer.full_casts for name, layer in layers.items()})

    def on_train_batch_end(self, trainer, *_):
        if self.keep and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(f"{trainer.global_step}.ckpt")

    def of(self, name):
        return [str(casts[name]) for casts in self.full]


def fit(*callbacks, model=None, plugin=None, ckpt_path=None, **kwargs):
    """Six steps, with callbacks and then a witness."""
    witness = Casts(kwargs.pop("keep", False))
    made = trainer(
        plugin or FP4Precision(quantize_output=True),
        callbacks=[*callbacks, witness],
        **{"max_steps": 6, "limit_train_batches": 64, **kwargs},
    )
    made.fit(model or Regression(), ckpt_path=ckpt_path)
    return witness
