"""Runs of which a switch changes a part."""

import torch

from lightning_lowbit import FP4Precision
from tests.callbacks.switches import runs
from tests.precision.regression_model import Regression


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


def fit(*callbacks, plugin=None, **kwargs):
    """Six steps in FP4, with callbacks and then a witness."""
    return runs.fit(*callbacks, plugin=plugin or FP4Precision(quantize_output=True), **{"max_steps": 6, **kwargs})
