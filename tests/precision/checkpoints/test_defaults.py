"""A checkpoint whose layers are left in high precision by default now, as earlier versions did not."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowbit import FP4Precision, LinearCasts, LowBitPrecision, restore
from tests.lightning_imports import LightningModule, quiet_trainer


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 1)

    def training_step(self, batch):
        return self.head(self.body(batch).relu()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.randn(2, 64, generator=torch.Generator().manual_seed(0)), batch_size=2)


def fit(plugin, steps, ckpt_path=None):
    trainer = quiet_trainer(plugin, max_steps=steps)
    trainer.fit(Regression(), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def test_a_run_that_quantized_a_narrow_layer_goes_on_with_its_casts_or_says_what_changed(tmp_path):
    path = tmp_path / "old.ckpt"
    fit(FP4Precision("nvfp4", seed=1, overrides={"head": "nvfp4"}), 2).save_checkpoint(path)
    with pytest.warns(
        UserWarning, match=r"(?s)head: nvfp4 in the checkpoint.*By default head stay in high .*overrides"
    ):
        resumed = fit(FP4Precision("nvfp4", seed=1), 3, path)
    assert resumed.lightning_module.head.weight.isfinite().all()
    kept = fit(LowBitPrecision.from_checkpoint(path), 3, path)
    assert kept.lightning_module.head.full_casts == LinearCasts.preset("nvfp4")
    assert restore(Regression(), path).head.casts == LinearCasts.preset("nvfp4")
