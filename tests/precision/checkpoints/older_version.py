"""Runs whose checkpoints an earlier version of the package wrote.

``python -m tests.precision.checkpoints.older_version FOLDER`` of that version made
``tests/data/older_version_*.ckpt`` and what the runs ended with.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbit import (
    FP4Precision,
    FP8Precision,
    GradientNormMonitor,
    LowBitAdamW,
    OsciReset,
    PrecisionSwitch,
    QAFSwitch,
    SpikeRollback,
    StableSPAM,
    TernaryPrecision,
)
from tests.lightning_imports import Callback, LightningModule, quiet_trainer

SAVED, STEPS = 3, 6
RUNS = {
    "fp4": (
        lambda: FP4Precision("nvfp4", skip=["2"], seed=1, compute_dtype="bf16"),
        lambda parameters: StableSPAM(parameters, lr=1e-2, reset_interval=4),
        lambda: [QAFSwitch(at=0.7), SpikeRollback(), GradientNormMonitor()],
    ),
    "fp8": (
        lambda: FP8Precision(history=3, seed=1, compute_dtype="bf16"),
        lambda parameters: LowBitAdamW(parameters, lr=1e-2, moments="fp8"),
        lambda: [PrecisionSwitch(to="hp-forward", step=4)],
    ),
    "ternary": (
        lambda: TernaryPrecision(seed=1, compute_dtype="bf16"),
        lambda parameters: StableSPAM(parameters, lr=1e-2),
        lambda: [OsciReset(window=2, every=2), PrecisionSwitch(to="bf16", step=5)],
    ),
}


class Model(LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16, bias=False))
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x).float(), y)

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class Save(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.path and trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


def train(name, save_to=None, resume_from=None):
    """Trains for STEPS steps, on one thread, and returns the weights."""
    make, optimizer, callbacks = RUNS[name]
    plugin = make()
    if resume_from is None:
        plugin.quantize_output = True  # as that version had it; a resumed run follows its checkpoint
    torch.manual_seed(0)
    model = Model(optimizer)
    data = TensorDataset(torch.randn(16, 32), torch.randn(16, 16))  # one batch, so that all steps see the same
    trainer = quiet_trainer(plugin, max_steps=STEPS, max_epochs=-1, callbacks=[*callbacks(), Save(save_to)])
    trainer.fit(model, DataLoader(data, batch_size=16), ckpt_path=resume_from, weights_only=True)
    return [parameter.detach().clone() for parameter in model.parameters()]


def main(folder):
    torch.set_num_threads(1)
    for name in RUNS:
        path = Path(folder) / f"older_version_{name}.ckpt"
        weights = train(name, save_to=path)
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["ended_with"] = {"weights": weights}
        torch.save(checkpoint, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
