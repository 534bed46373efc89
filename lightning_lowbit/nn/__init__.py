"""Quantised linear layers."""

from lightning_lowbit.nn.casts import OPERANDS, PHASES, PRESETS, LinearCasts
from lightning_lowbit.nn.convert import convert, plan, set_phase
from lightning_lowbit.nn.coverage import Coverage, GemmCounter
from lightning_lowbit.nn.keys import LayerKeys
from lightning_lowbit.nn.linear import QuantizedLayer, QuantLinear

__all__ = [
    "OPERANDS",
    "PHASES",
    "PRESETS",
    "Coverage",
    "GemmCounter",
    "LayerKeys",
    "LinearCasts",
    "QuantLinear",
    "QuantizedLayer",
    "convert",
    "plan",
    "set_phase",
]
