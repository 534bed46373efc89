"""A GAN in manual optimization, in FP8: it learns a ring of eight dots. A minute on a CPU.

python gan.py --steps 1500
"""

import argparse
import math
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lowbit import FP8Precision, LowBitProgressBar

CENTERS = torch.tensor([[math.cos(i * math.pi / 4), math.sin(i * math.pi / 4)] for i in range(8)])


def perceptron(inputs: int, outputs: int, width: int = 128) -> nn.Sequential:
    """Returns two hidden layers; only those as wide as a few dozen numbers are quantized."""
    hidden = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class Gan(LightningModule):
    """A generator of points from noise, and a discriminator that tells them from the data's."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = perceptron(16, 2), perceptron(2, 1)

    def generate(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, 16, device=self.device)).float()

    def judge(self, points: Tensor, is_real: bool) -> Tensor:
        logits = self.discriminator(points).float()
        return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, is_real))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        loss = self.judge(batch, True) + self.judge(self.generate(len(batch)).detach(), False)
        self.step(discriminator, loss)
        self.log("discriminator", loss, prog_bar=True)
        self.step(generator, loss := self.judge(self.generate(len(batch)), True))
        self.log("generator", loss, prog_bar=True)

    def step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = self.generator, self.discriminator
        return [torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in parts]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args(arguments).steps
    seed_everything(0, verbose=False)
    points = CENTERS[torch.randint(8, (steps, 256))] + 0.05 * torch.randn(steps, 256, 2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    # Scales of the tensor at hand: two networks that change by turns have no history to go by.
    plugin = FP8Precision("current")
    trainer = Trainer(max_epochs=1, plugins=[plugin], callbacks=[LowBitProgressBar(50)], **quiet)
    trainer.fit(model := Gan(), DataLoader(points, batch_size=None))
    with torch.no_grad():
        distances = torch.cdist(model.generate(2000).cpu(), CENTERS).min(1)
    dots = distances.indices[distances.values < 0.2].unique().numel()
    print(f"dots of 8 that the generator hits: {dots}; median distance {distances.values.median():.3f} (data: 0.059)")


if __name__ == "__main__":
    main()
