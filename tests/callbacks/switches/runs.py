"""Runs that switch, and what is in force in each of their steps."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lowbit import FP4Precision
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from tests.lightning_imports import Callback
from tests.precision.regression_model import Regression, flat, trainer, two_casts

RESUMES = [
    pytest.mark.filterwarnings("ignore:Training ended at"),  # many end in the middle of a switch
    # The loader begins again, and nothing depends on it: a batch follows from its place in the run.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]


class Saving(Callback):
    """Saves a checkpoint after each optimizer step, once it is ``"trained"`` or ``"validated"``; None saves none."""

    def __init__(self, keep=None):
        self.keep = keep

    def on_train_batch_end(self, trainer, *_):
        self._save(trainer, "trained")

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self._save(trainer, "validated")

    def _save(self, trainer, when):
        if self.keep == when and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(f"{trainer.global_step}.ckpt")


class Witness(Saving):
    """What is in force in each optimizer step, as the layers have it, and the weights at the end.

    Attributes:
        rows: of each step its number, the phase, λ, and the casts of all layers outside the phase.
    """

    def __init__(self, keep=None):
        super().__init__(keep)
        self.rows, self.weights = [], None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        plugin = trainer.precision_plugin
        layers = {name: m for name, m in pl_module.named_modules() if isinstance(m, QuantizedLayer)}
        assert layers
        for name, layer in layers.items():
            assert layer.casts == layer.full_casts.phase(plugin.phase), f"{name} is not in phase {plugin.phase}"
            blend = 1.0 if layer.lowbit.blend is None else layer.lowbit.blend.item()
            assert blend == plugin.blend.item(), "the layers have another λ than the plugin"
        casts = {name: layer.full_casts for name, layer in layers.items()}
        row = trainer.global_step, plugin.phase, plugin.blend.item(), casts
        if not self.rows or self.rows[-1][0] != trainer.global_step:
            self.rows.append(row)
        assert self.rows[-1] == row, f"it changes within step {trainer.global_step}"

    def on_train_end(self, trainer, pl_module):
        self.weights = flat(pl_module)

    @property
    def phases(self):
        return [phase for _, phase, *_ in self.rows]

    @property
    def blends(self):
        return [blend for _, _, blend, _ in self.rows]

    @property
    def casts(self):
        return [casts for *_, casts in self.rows]

    def of(self, name):
        return [str(casts[name]) for casts in self.casts]


def fit(*callbacks, model=None, plugin=None, ckpt_path=None, keep=None, **kwargs):
    """Eight steps, with callbacks and then a witness."""
    witness = Witness(keep)
    defaults = {"max_steps": 8, "limit_train_batches": 64, "num_sanity_val_steps": 0}
    made = trainer(plugin or two_casts(), callbacks=[*callbacks, witness], **{**defaults, **kwargs})
    made.fit(model or Regression(), ckpt_path=ckpt_path)
    return witness


def fit_fp4(*callbacks, plugin=None, **kwargs):
    """Six steps in FP4."""
    return fit(*callbacks, plugin=plugin or FP4Precision(quantize_output=True), **{"max_steps": 6, **kwargs})


class Validated(Regression):
    """Its validation says what it is told to, once and again the last."""

    def __init__(self, *said, name="val_loss"):
        super().__init__()
        self.said, self.name, self.done = said, name, 0

    def validation_step(self, batch, batch_idx):
        self.log(self.name, self.said[min(self.done, len(self.said) - 1)])

    def on_validation_epoch_end(self):
        self.done += not self.trainer.sanity_checking

    def on_save_checkpoint(self, checkpoint):
        checkpoint["done"] = self.done

    def on_load_checkpoint(self, checkpoint):
        self.done = checkpoint["done"]


class Scheduled(Regression):
    """Notes the learning rate within each step, after which a schedule halves it.

    Args:
        make: the optimizer.
    """

    def __init__(self, make=lambda p: torch.optim.Adam(p, 1e-2)):
        super().__init__()
        self.make, self.rates = make, []

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        schedule = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
        def noted():  # the hooks before a step have run
            loss = closure()
            self.rates.append(float(optimizer.param_groups[0]["lr"]))
            return loss

        optimizer.step(closure=noted)


class Texts(Validated):
    """Its batches are 10 token numbers each, from which nothing is learned."""

    def __init__(self):
        super().__init__(3.0, 2.0, 2.0)

    def train_dataloader(self):
        return DataLoader(torch.arange(640).view(64, 10))


def fit_texts(*callbacks, **kwargs):
    return fit(*callbacks, **{"model": Texts(), **kwargs})


def first_step(*callbacks, **kwargs):
    """The first step in the phase."""
    return next((step for step, phase, *_ in fit_texts(*callbacks, **kwargs).rows if phase == "qaf"), None)
