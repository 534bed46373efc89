"""A ResNet on scikit-learn's handwritten digits: python docs/examples/resnet_digits.py nvfp4 [seeds]"""

import sys
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from resnet import ResNet
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbit import FP4Precision, IntegerPrecision, LowBitPrecision

ENDS = {"skip": ["stem", "head"]}  # what reads pixels and what decides stay in high precision
PLUGINS: dict[str, Any] = {
    "bf16": lambda: LowBitPrecision("bf16"),
    "nvfp4": lambda: FP4Precision("nvfp4", **ENDS),
    "int4": lambda: IntegerPrecision(4, activation_bits=8, group="row", **ENDS),  # scales of channels and of patches
}


def accuracy(name: str, seed: int, steps: int = 240) -> float:
    """Percent of the last 597 digits that are read correctly, after training on the first 1200."""
    seed_everything(seed, verbose=False)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(digits.target)
    train = DataLoader(TensorDataset(x[:1200], y[:1200]), 100, shuffle=True)
    test = DataLoader(TensorDataset(x[1200:], y[1200:]), 597)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer, model = Trainer(max_steps=steps, accelerator="cpu", plugins=[PLUGINS[name]()], **quiet), ResNet(steps)
    trainer.fit(model, train)
    return 100 * trainer.test(model, test, verbose=False)[0]["correct"]


if __name__ == "__main__":
    for seed in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1):
        print(f"{sys.argv[1]}, seed {seed}: {accuracy(sys.argv[1], seed):.2f} %")
