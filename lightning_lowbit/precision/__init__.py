"""Precision plugins for the Trainer."""

from lightning_lowbit.precision.base import LowBitPrecision
from lightning_lowbit.precision.fp4 import FP4Precision
from lightning_lowbit.precision.fp8 import FP8Precision
from lightning_lowbit.precision.integer import IntegerPrecision
from lightning_lowbit.precision.restored import restore
from lightning_lowbit.precision.ternary import TernaryPrecision

__all__ = ["FP4Precision", "FP8Precision", "IntegerPrecision", "LowBitPrecision", "TernaryPrecision", "restore"]
