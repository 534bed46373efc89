"""Quantizing one tensor."""

from lightning_lowbit.quant.cast import Cast, Scale
from lightning_lowbit.quant.hadamard import Hadamard, rotate
from lightning_lowbit.quant.mean import split_mean
from lightning_lowbit.quant.quantize import Operand, Quantized, blend, quantize, quantize_operand
from lightning_lowbit.quant.smooth import largest, smoothing_factor
from lightning_lowbit.quant.surrogate import SURROGATES, surrogate_factor, through_rounding

__all__ = [
    "SURROGATES",
    "Cast",
    "Hadamard",
    "Operand",
    "Quantized",
    "Scale",
    "blend",
    "largest",
    "quantize",
    "quantize_operand",
    "rotate",
    "smoothing_factor",
    "split_mean",
    "surrogate_factor",
    "through_rounding",
]
