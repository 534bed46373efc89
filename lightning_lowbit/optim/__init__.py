"""Optimizers that keep low-bit training stable."""

from lightning_lowbit.distributed import connect
from lightning_lowbit.optim.adam import SPAM, LowBitAdamW, StableSPAM
from lightning_lowbit.optim.adaptive import Adaptive
from lightning_lowbit.optim.muon import Muon

__all__ = ["SPAM", "Adaptive", "LowBitAdamW", "Muon", "StableSPAM", "connect"]
