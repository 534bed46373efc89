"""A model that several processes train through Lightning, with an optimizer by name."""

import torch

from lightning_lowbit import LowBitPrecision
from lightning_lowbit.optim import Adaptive, LowBitAdamW, Muon, StableSPAM
from tests import ranks

OPTIMIZERS = {
    "stable_spam": lambda p: StableSPAM(p, reset_interval=5, weight_decay=0.1),
    "adaptive": lambda p: Adaptive(torch.optim.AdamW(p)),
    "fp8": lambda p: LowBitAdamW(p),
    "muon": lambda p: Muon(p, adam_names=[]),
}


class Regression(ranks.Regression):
    """With one of the ``OPTIMIZERS``. One batch has large inputs."""

    def __init__(self, name, shard=False):
        super().__init__(shard)
        self.name = name

    def inputs(self, step, batch_idx):
        x, y = super().inputs(step, batch_idx)
        return (20.0 if step == 3 else 1.0) * x, y

    def configure_optimizers(self):
        return OPTIMIZERS[self.name](self.trainer.model.parameters())


def plugin():
    """Without a cast."""
    return LowBitPrecision("bf16", compute_dtype="fp32")
