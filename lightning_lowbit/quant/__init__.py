"""Quantizing one tensor."""

import warnings
from typing import Any

from lightning_lowbit.quant.cast import Cast, Scale
from lightning_lowbit.quant.operand import (
    SURROGATES,
    Operand,
    blend,
    quantize_operand,
    surrogate_factor,
    through_rounding,
)
from lightning_lowbit.quant.quantized import Quantized, quantize
from lightning_lowbit.quant.transforms import Hadamard, amax_along, rotate, smoothing_factor, split_mean

__all__ = [
    "SURROGATES",
    "Cast",
    "Hadamard",
    "Operand",
    "Quantized",
    "Scale",
    "amax_along",
    "blend",
    "quantize",
    "quantize_operand",
    "rotate",
    "smoothing_factor",
    "split_mean",
    "surrogate_factor",
    "through_rounding",
]


def __getattr__(name: str) -> Any:
    if name == "largest":
        warnings.warn("lightning_lowbit.quant.largest is now amax_along", DeprecationWarning, stacklevel=2)
        return amax_along
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
