"""A U-Net that takes noise off pictures, in 4-bit weights and 8-bit activations. A minute on a CPU.

python unet.py --steps 200
"""

import argparse
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lowbit import IntegerPrecision, LowBitProgressBar


class Double(nn.Sequential):
    """Two convolutions of 3 x 3, each with a norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        first = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()]
        super().__init__(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())


class UNet(LightningModule):
    """Two levels down and up again; a level sees the one of the same size before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.left, self.middle, self.right = Double(width, width), Double(width, 2 * width), Double(2 * width, width)
        self.down, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, noisy: Tensor) -> Tensor:
        fine = self.left(self.stem(noisy))
        coarse = self.up(self.middle(self.down(fine)))
        return noisy + self.head(self.right(torch.cat([fine, coarse], 1))).float()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        clean, noisy = batch
        loss = nn.functional.mse_loss(self(noisy), clean)
        self.log("loss", loss, prog_bar=True)
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def pictures(batches: int, seed: int) -> DataLoader:
    """Returns batches of 16 pictures of 32 x 32 with a disk each, and the same under noise of size 0.5."""
    random = torch.Generator().manual_seed(seed)
    center = torch.rand(batches, 16, 1, 1, 1, 2, generator=random) * 20 + 6
    radius = torch.rand(batches, 16, 1, 1, 1, generator=random) * 6 + 3
    grid = torch.stack(torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij"), -1)
    clean = ((grid - center).norm(dim=-1) < radius).float()
    return DataLoader([*zip(clean, clean + 0.5 * torch.randn(clean.shape, generator=random))], batch_size=None)  # noqa: B905


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args(arguments).steps
    seed_everything(0, verbose=False)
    # The stem reads pixels and the head writes them: both stay in high precision. Not told apart from bf16 on digits.
    plugin = IntegerPrecision(4, 8, "row", skip=["stem", "head"])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=steps, max_epochs=1, plugins=[plugin], callbacks=[LowBitProgressBar(10)], **quiet)
    trainer.fit(model := UNet(), pictures(steps, seed=1), validation := pictures(8, seed=2))
    (metrics,) = trainer.validate(model, validation, verbose=False)
    print(f"mean squared error: {0.5**2:.4f} with noise, {metrics['loss']:.4f} without")


if __name__ == "__main__":
    main()
