"""A callback: how much noise quantization adds to each weight, at the end of the run."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_lowbit.metrics import cast_statistics
from lightning_lowbit.nn import QuantizedLayer


class WeightNoise(Callback):
    """Computes the SQNR of the weights of all quantized layers when training ends, for `RunReport` to show.

    Args:
        least: SQNR in dB below which a layer is listed among the alerts.
    """

    def __init__(self, least: float = 10.0) -> None:
        self.least = least
        self.sqnr: dict[str, float] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, layer in pl_module.named_modules():
            if isinstance(layer, QuantizedLayer) and (cast := layer.casts.cast_of("fprop_w")):
                self.sqnr[name] = cast_statistics(layer.weight.detach(), cast).floats()["sqnr"]

    def report_alerts(self, trainer: Trainer) -> list[str]:
        return [f"{name}: the weight has {db:.1f} dB." for name, db in self.sqnr.items() if db < self.least]

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        return {"weight_sqnr": self.sqnr}
