"""The model of digits.yaml: 64 random numbers per sample, ten classes."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbit import StableSPAM


class Digits(LightningModule):
    """Two linear layers; the class of a sample is the largest of its first ten numbers."""

    def __init__(self, width: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.body = nn.Linear(64, width)
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.body(x).relu()).float(), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return StableSPAM(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=32)
