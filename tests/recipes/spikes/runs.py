"""Runs whose gradients are spoiled."""

from types import SimpleNamespace

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from tests.lightning_imports import quiet_trainer

SIZES = (3, 4), (5,), (3, 4)
SLOPE = 0.125  # of the loss in each direction, a power of two, so that products with 1000 are exact


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


class Slope(LightningModule):
    """A loss whose gradient is the same everywhere; notes all gradients at each step, before and after clipping."""

    def __init__(self, optimizers=(lambda module: sgd(module.parameters()),), sizes=SIZES):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(size) for size in sizes])
        self.make_optimizers, self.automatic_optimization = optimizers, len(optimizers) == 1
        self.seen, self.clipped = {}, {}

    def training_step(self, batch, batch_idx):
        loss = SLOPE * sum(weight.sum() for weight in self.weights)
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            self.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer):
        self.seen[self.trainer.global_step] = [weight.grad.clone() for weight in self.weights]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.clipped[self.trainer.global_step - 1] = [weight.grad.clone() for weight in self.weights]

    def configure_optimizers(self):
        return [make(self) for make in self.make_optimizers]


def fit(spikes, module=None, steps=40, ckpt_path=None, **options):
    module = Slope() if module is None else module
    trainer = quiet_trainer(max_steps=steps, callbacks=[spikes], **options)
    trainer.fit(module, DataLoader(range(1000)), ckpt_path=ckpt_path)
    return module


def gradients_after(spikes, step=0, sizes=SIZES, order=1):
    """What one step makes of gradients of 1, for an optimizer that has the parameters in some order."""
    module = Slope(sizes=sizes)
    module.log = lambda name, value: None
    for weight in module.weights:
        weight.grad = torch.ones_like(weight)
    optimizer = sgd(list(module.weights)[::order])
    spikes.on_before_optimizer_step(SimpleNamespace(global_step=step), module, optimizer)
    return [weight.grad for weight in module.weights]


def spiked(spikes, steps):
    """Whether each step has a spike."""
    return tuple(gradients_after(spikes, step, sizes=[(1,)])[0].item() != 1 for step in range(steps))
