"""Convolutions under a Trainer: callbacks, checkpoints and what they restore."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbit import (
    FP4Precision,
    GradientNoiseMonitor,
    IntegerPrecision,
    OsciReset,
    PrecisionSummary,
    QuantizationMonitor,
    restore,
)
from lightning_lowbit.cli.lab.estimate.shapes import describe
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.nn.conversion.bake import bake
from tests.lightning_imports import LightningModule, quiet_trainer


class Images(LightningModule):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16)
        self.body, self.groups = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, groups=2)
        self.depthwise, self.head = nn.Conv2d(32, 32, 1, groups=32), nn.Linear(32, 4)

    def forward(self, x):
        x = self.body(self.norm(self.stem(x)).relu()).relu()
        return self.head(self.depthwise(self.groups(x)).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def train_dataloader(self):
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(24, 3, 8, 8, generator=draw)
        return DataLoader(TensorDataset(images, images.mean((1, 2, 3)).gt(0).long()), 4)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(plugin, *callbacks, steps=4):
    torch.manual_seed(0)
    trainer = quiet_trainer(plugin, max_steps=steps, callbacks=[*callbacks], log_every_n_steps=1, logger=True)
    trainer.fit(Images())
    return trainer


def test_callbacks_see_convolutions(capsys):
    monitor, noise = QuantizationMonitor(), GradientNoiseMonitor(every_n_steps=2)
    resets = OsciReset(window=2, every=2, threshold=1.01)
    trainer = fit(FP4Precision("nvfp4", quantize_output=True), monitor, resets, noise)
    fit(FP4Precision("nvfp4", quantize_output=True), PrecisionSummary(), steps=1)
    assert "reset/fprop_w/body" in trainer.callback_metrics
    data = monitor.report_data(trainer)
    assert {"body", "groups"} <= data["quantized_operands"]["layers"].keys()
    assert "body" in data["quantized_weights"]["layers"]
    assert [seen["step"] for seen in noise.report_data(trainer)["gradient_noise"]["ratios"]] == [2, 4]
    table, _, uncovered = capsys.readouterr().out.partition("not covered")
    assert "16×3×3 → 32" in table
    assert "depthwise" in uncovered and "body" not in uncovered


def test_a_checkpoint_is_restored_and_baked(tmp_path):
    trainer = fit(IntegerPrecision(4, activation_bits=None, group="row"))
    trainer.save_checkpoint(path := tmp_path / "last.ckpt")
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model = restore(Images(), path).eval()
    assert sum(isinstance(module, QuantizedLayer) for module in model.modules()) == 4
    y = model(images)
    baked = bake(model).eval()
    assert all(len(row.unique()) <= 15 for row in baked.groups.weight.detach())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(baked(images).float(), y.float(), atol=0.05)


def test_an_estimate_counts_weights_and_says_what_it_cannot_know():
    with torch.device("meta"):
        model, notes = describe(Images())
    assert model.parameters == sum(p.numel() for p in Images().parameters())
    assert sum("Of 4 convolutions, weights" in note for note in notes) == 1
