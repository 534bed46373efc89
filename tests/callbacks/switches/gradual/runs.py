"""λ of the steps of runs that switch gradually, and plateaus for them."""

from tests.callbacks.switches.runs import fit
from tests.lightning_imports import BoringModel, Trainer
from tests.precision.regression_model import Regression


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


def blends(*callbacks, **kwargs):
    """λ of each step."""
    return fit(*callbacks, **kwargs).blends


NAN, INF = float("nan"), float("inf")


def seen(switch):
    """What a checkpoint holds of a switch."""
    checkpoint = {}
    switch.on_save_checkpoint(Trainer(logger=False), BoringModel(), checkpoint)
    (state,) = checkpoint["lightning_lowbit_switches"].values()
    return dict(state)
