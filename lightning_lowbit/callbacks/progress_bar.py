"""The precision phase on the progress bar."""

from typing import Any

from lightning_lowbit._lightning import LightningModule, TQDMProgressBar, Trainer
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.precision import LowBitPrecision


class LowBitProgressBar(LowBitCallback, TQDMProgressBar):
    """Lightning's progress bar, with the phase of the precision plugin next to the metrics.

    Args:
        refresh_rate: batches between updates; 0 disables the bar.

    Examples:
        >>> Trainer(plugins=[FP4Precision()], callbacks=[LowBitProgressBar(refresh_rate=10)])
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        plugin = trainer.precision_plugin
        phase = plugin.phase if isinstance(plugin, LowBitPrecision) else str(plugin.precision)
        return {"phase": phase, **metrics}
