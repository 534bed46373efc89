"""The base class of all callbacks of this package."""

from lightning_lowbit._lightning import Callback, LightningModule, Trainer, check_trainer


class LowBitCallback(Callback):
    """A callback that refuses the Trainer of the other Lightning package (``lightning`` or ``pytorch_lightning``)."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the Trainer. Subclasses call ``super()`` first."""
        check_trainer(self, trainer)
        super().setup(trainer, pl_module, stage)
