"""Two steps of a stranger's model with the plugin, and how much of its arithmetic was quantized."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_lowbit import FP4Precision, PrecisionSummary
from lightning_lowbit.callbacks.layer_table import merge_numbers
from tests.lightning_imports import LightningModule, quiet_trainer


class Wrapped(LightningModule):
    def __init__(self, model, batch):
        super().__init__()
        self.model, self.batch, self.losses = model, batch, list[float]()

    def training_step(self, batch):
        loss = _loss(self.model(**self.batch) if isinstance(self.batch, Mapping) else self.model(*self.batch))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader([0, 1])


def _loss(output):
    if isinstance(output, Tensor):
        return output.float().square().mean()
    if getattr(output, "loss", None) is not None:
        return output.loss
    values = output.values() if isinstance(output, Mapping) else output
    trained = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    return sum(value.float().square().mean() for value in trained)


def train(build, batch):
    """Trains a model in NVFP4, and checks that its checkpoint fits a model that was never converted.

    Returns the covered share, and what is not covered, largest first: (names, share, why).
    """
    model = build()
    keys = list(model.state_dict())
    summary, module = PrecisionSummary(quiet=True), Wrapped(model, batch)
    trainer = quiet_trainer(FP4Precision("nvfp4", seed=1, quantize_output=True), max_steps=2, callbacks=[summary])
    trainer.fit(module)
    assert len(module.losses) == 2 and torch.tensor(module.losses).isfinite().all(), module.losses
    assert list(model.state_dict()) == keys, "names of parameters have changed"
    build().load_state_dict(model.state_dict(), strict=True)
    data = summary.report_data(trainer)
    rows, flops = merge_numbers(data["uncovered"], data["uncovered_because"]), data["flops_per_micro_batch"]
    return data["coverage"], [(names, part / flops, why) for names, _, part, why in rows]
