"""Optimizers that keep low-bit training stable."""

from lightning_lowbit.optim.clipping import ada_clip_, ada_gn_
from lightning_lowbit.optim.stable_spam import StableSPAM

__all__ = ["StableSPAM", "ada_clip_", "ada_gn_"]
