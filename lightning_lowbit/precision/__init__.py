"""Precision plugins for the Trainer, and scalers of the loss."""

from lightning_lowbit.precision.base import LowBitPrecision
from lightning_lowbit.precision.checkpoints.restored import restore
from lightning_lowbit.precision.fp4 import FP4Precision
from lightning_lowbit.precision.fp8 import FP8Precision
from lightning_lowbit.precision.grad_scalers import (
    ConservativeGradScaler,
    GradientNormGradScaler,
    ShardedConservativeGradScaler,
    ShardedGradientNormGradScaler,
    ShardedStaticGradScaler,
    StaticGradScaler,
)
from lightning_lowbit.precision.integer import IntegerPrecision
from lightning_lowbit.precision.ternary import TernaryPrecision

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
