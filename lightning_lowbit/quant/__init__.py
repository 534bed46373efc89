"""Quantising one tensor."""

from lightning_lowbit.quant.cast import Cast, Scale
from lightning_lowbit.quant.quantize import Operand, Quantized, quantize, quantize_operand

__all__ = ["Cast", "Operand", "Quantized", "Scale", "quantize", "quantize_operand"]
