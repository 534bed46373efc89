"""Weights that oscillate between levels."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowbit import IntegerPrecision
from tests.curves import csv_curves
from tests.lightning_imports import BoringModel, Callback, RandomDataset, quiet_trainer

# Of a row whose largest element is 7 the int4 scale is 1, and the levels are whole numbers.
PLUGIN = {"weight_bits": 4, "activation_bits": None, "group": "row", "compute_dtype": "fp32"}


# Element by element what a weight is after t steps, and its ratio over ten steps.
MOVES = {
    "the largest": (lambda t: 7.0, "still"),
    "oscillating": (lambda t: 2.49 + 0.02 * (t % 2), "1 / 0.02"),
    "oscillating below 0": (lambda t: -0.49 - 0.02 * (t % 2), "1 / 0.02"),
    "oscillating widely": (lambda t: 4.3 + 0.4 * (t % 2), "1 / 0.4"),
    "traveling": (lambda t: -6.0 + 0.6 * t, "6 / 6"),
    "crossing once": (lambda t: 3.41 + 0.02 * t, "1 / 0.2"),
    "still": (lambda t: 1.5, "0 / 0"),
    "trembling in its bin": (lambda t: 5.1 + 0.1 * (t % 2), "0 / 1"),
}

WEIGHT = torch.tensor([[[move(t) for move, _ in MOVES.values()]] for t in range(64)])


class Scripted(torch.optim.Optimizer):
    """Adds to a weight what a script does in this step, from wherever it is."""

    def __init__(self, parameters, script):
        super().__init__(parameters, {"steps": 0})
        self.script = script

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        (group,) = self.param_groups
        (weight,) = group["params"]
        weight += (self.script[group["steps"] + 1] - self.script[group["steps"]]).view_as(weight)
        group["steps"] += 1
        return loss


class Row(BoringModel):
    def __init__(self, script=WEIGHT):
        super().__init__()
        self.layer = nn.Linear(script.shape[-1], script.shape[-2], bias=False)
        self.layer.weight.data = script[0].clone()
        self.script = script

    def configure_optimizers(self):
        return Scripted(self.parameters(), self.script)

    def train_dataloader(self):
        return DataLoader(RandomDataset(self.layer.weight.shape[-1], 64), batch_size=1)


class Watch(Callback):
    """The weight at the end of each batch."""

    def __init__(self):
        self.weights = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.weights.append(pl_module.layer.weight.detach().clone())


def trainer(*callbacks, plugin=None, **kwargs):
    defaults = {"max_steps": 10, "limit_val_batches": 0}
    plugins = [plugin or IntegerPrecision(**PLUGIN)]
    return quiet_trainer(plugins=plugins, callbacks=list(callbacks), **{**defaults, **kwargs})


def fit(*callbacks, model=None, **kwargs):
    """Runs, and returns the weight after each batch and its callbacks."""
    watch = Watch()
    trainer(*callbacks, watch, **kwargs).fit(model or Row())
    return watch.weights


def reset_at(weights, script=WEIGHT, accumulate=1):
    """Which elements did something else than the script, by optimizer step."""
    found = {}
    before = script[0]
    for batch, weight in enumerate(weights):
        step, is_step = divmod(batch + 1, accumulate)
        move = script[step] - script[step - 1] if is_step == 0 else torch.zeros_like(before)
        changed = ((weight - before - move).abs() > 1e-3).flatten().tolist()
        if any(changed):
            found[step if is_step == 0 else -batch] = [name for name, odd in zip(MOVES, changed, strict=True) if odd]
        before = weight
    return found


def logged(run):
    return csv_curves(run, lambda name: name.startswith("reset/"))
