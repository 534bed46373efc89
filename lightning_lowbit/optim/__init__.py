"""Optimizers that keep low-bit training stable."""

from lightning_lowbit.distributed import connect
from lightning_lowbit.optim.adamw import LowBitAdamW
from lightning_lowbit.optim.adaptive import Adaptive
from lightning_lowbit.optim.spam import SPAM
from lightning_lowbit.optim.stable_spam import StableSPAM

__all__ = ["SPAM", "Adaptive", "LowBitAdamW", "StableSPAM", "connect"]
