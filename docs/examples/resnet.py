"""A small ResNet for images of 8x8 pixels, for resnet_digits.py."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm2(self.second(self.norm1(self.first(x)).relu())) + self.shortcut(x)).relu()


class ResNet(LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.stem, self.head = steps, nn.Conv2d(1, 32, 3, 1, 1), nn.Linear(64, 10)
        self.blocks = nn.Sequential(Block(32, 32, 1), Block(32, 64, 2), Block(64, 64, 1))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).relu()).mean((2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]).float(), batch[1])

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("correct", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> tuple[list[object], list[object]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.05)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return [optimizer], [{"scheduler": decay, "interval": "step"}]
