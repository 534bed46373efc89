"""Runs that switch gradually, and λ of their steps."""

from lightning_lowbit.nn.layers.layer import QuantizedLayer
from tests.lightning_imports import BoringModel, Callback, Trainer
from tests.precision.regression_model import Regression, trainer, two_casts


class Witness(Callback):
    """What is in force in each micro-batch, by optimizer step: the phase, and λ as the layers have it."""

    def __init__(self, keep=None):
        self.phases = {}
        self.blends = {}
        self.keep = keep

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        plugin, step = trainer.precision_plugin, trainer.global_step
        layers = [module for module in pl_module.modules() if isinstance(module, QuantizedLayer)]
        assert layers
        assert {layer.casts == layer.full_casts.phase(plugin.phase) for layer in layers} == {True}
        (blend,) = {1.0 if layer.lowbit.blend is None else layer.lowbit.blend.item() for layer in layers}
        assert blend == plugin.blend.item(), "the layers have another λ than the plugin"
        assert self.blends.setdefault(step, blend) == blend, f"λ changes within step {step}"
        assert self.phases.setdefault(step, plugin.phase) == plugin.phase

    def on_train_batch_end(self, trainer, *_):
        self._save(trainer, "trained")

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self._save(trainer, "validated")

    def _save(self, trainer, when):
        if self.keep == when and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(f"{trainer.global_step}.ckpt")


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


def fit(*callbacks, model=None, ckpt_path=None, **kwargs):
    """Eight steps, with callbacks and then a witness."""
    witness = Witness(kwargs.pop("keep", None))
    defaults = {"max_steps": 8, "limit_train_batches": 64, "num_sanity_val_steps": 0}
    made = trainer(kwargs.pop("plugin", None) or two_casts(), callbacks=[*callbacks, witness], **{**defaults, **kwargs})
    made.fit(model or Regression(), ckpt_path=ckpt_path)
    return witness


def blends(*callbacks, **kwargs):
    """λ of each step."""
    return list(fit(*callbacks, **kwargs).blends.values())


NAN, INF = float("nan"), float("inf")


def seen(switch):
    """What a checkpoint holds of a switch."""
    checkpoint = {}
    switch.on_save_checkpoint(Trainer(logger=False), BoringModel(), checkpoint)
    (state,) = checkpoint["lightning_lowbit_switches"].values()
    return dict(state)
