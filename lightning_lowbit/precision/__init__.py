"""Precision plugins for the Trainer, and scalers of the loss."""

from lightning_lowbit.precision.base import LowBitPrecision
from lightning_lowbit.precision.checkpoints.restored import restore
from lightning_lowbit.precision.formats import FP4Precision, FP8Precision, IntegerPrecision, TernaryPrecision
from lightning_lowbit.precision.grad_scalers import (
    ConservativeGradScaler,
    GradientNormGradScaler,
    ShardedConservativeGradScaler,
    ShardedGradientNormGradScaler,
    ShardedStaticGradScaler,
    StaticGradScaler,
)

__all__ = [
    "ConservativeGradScaler",
    "FP4Precision",
    "FP8Precision",
    "GradientNormGradScaler",
    "IntegerPrecision",
    "LowBitPrecision",
    "ShardedConservativeGradScaler",
    "ShardedGradientNormGradScaler",
    "ShardedStaticGradScaler",
    "StaticGradScaler",
    "TernaryPrecision",
    "restore",
]
