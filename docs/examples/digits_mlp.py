"""A perceptron on scikit-learn's handwritten digits, in high precision and in FP4, side by side. Seconds on a CPU.

python digits_mlp.py --epochs 10
"""

import argparse
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbit import FP4Precision, LowBitPrecision, PrecisionSummary, StableSPAM


class Digits(LightningModule):
    """Three linear layers, from 64 pixels to ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        return nn.functional.cross_entropy(self.net(images).float(), digits)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, digits = batch
        logits = self.net(images).float()
        self.log("loss", nn.functional.cross_entropy(logits, digits))
        self.log("accuracy", (logits.argmax(1) == digits).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return StableSPAM(self.parameters(), lr=1e-3)  # in four bits it was ahead of AdamW


def loaders() -> tuple[DataLoader, DataLoader]:
    """Returns loaders of 1500 images for training and 297 for validation."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 8 - 1, dtype=torch.float32), torch.tensor(digits.target)
    train, rest = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
    return DataLoader(train, batch_size=50, shuffle=True), DataLoader(rest, batch_size=297)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args(arguments).epochs
    plugins = {
        "high precision": LowBitPrecision("bf16"),  # nothing is quantized
        "FP4": FP4Precision("nvfp4"),  # all layers but the last one, which decides
    }
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    print(f"{'':16}{'loss':>8}{'accuracy':>10}")
    for name, plugin in plugins.items():
        seed_everything(0, verbose=False)  # the same weights and order of images
        summary = [PrecisionSummary()] if name == "FP4" else []
        trainer = Trainer(max_epochs=epochs, plugins=[plugin], callbacks=summary, enable_progress_bar=False, **quiet)
        train, validation = loaders()
        trainer.fit(model := Digits(), train, validation)
        (metrics,) = trainer.validate(model, validation, verbose=False)
        print(f"{name:16}{metrics['loss']:8.3f}{metrics['accuracy']:10.1%}")


if __name__ == "__main__":
    main()
