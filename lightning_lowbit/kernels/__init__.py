"""Kernels: one call for what touches every element of an operand, on CPUs and GPUs.

The plain code of :mod:`lightning_lowbit.quant` is the specification, and serves where no kernel does.
"""

from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels.delayed import delayed_amax
from lightning_lowbit.kernels.native import lay_out_operand, lay_out_packed
from lightning_lowbit.kernels.operands import amax_of, coverage, quantize_both, quantize_operand, rotate
from lightning_lowbit.kernels.packing import Packed, pack_operand, unpack_operand

__all__ = [
    "Packed",
    "amax_of",
    "backend",
    "coverage",
    "delayed_amax",
    "lay_out_operand",
    "lay_out_packed",
    "pack_operand",
    "quantize_both",
    "quantize_operand",
    "rotate",
    "unpack_operand",
]
