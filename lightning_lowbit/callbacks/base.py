"""What all callbacks of this package are."""

from lightning_lowbit._lightning import Callback, LightningModule, Trainer, check_trainer


class LowBitCallback(Callback):
    """Refuses a Trainer of the other Lightning, in which many a callback would see nothing of what it looks for."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the Trainer; subclasses call ``super()`` first."""
        check_trainer(self, trainer)
        super().setup(trainer, pl_module, stage)
