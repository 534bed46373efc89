"""Kernels: one call for each operation on all elements of an operand, on CPUs and GPUs.

The plain code of :mod:`lightning_lowbit.quant` is the specification, and serves where no kernel does.
"""

import warnings
from typing import Any

from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels.operands import amax_of, kernel_support, quantize_both, quantize_operand, rotate
from lightning_lowbit.kernels.packing import lay_out_both, lay_out_operand, lay_out_packed, pack_operand, unpack_operand
from lightning_lowbit.kernels.products import delayed_amax
from lightning_lowbit.quant.packed import Packed

__all__ = [
    "Packed",
    "amax_of",
    "backend",
    "delayed_amax",
    "kernel_support",
    "lay_out_both",
    "lay_out_operand",
    "lay_out_packed",
    "pack_operand",
    "quantize_both",
    "quantize_operand",
    "rotate",
    "unpack_operand",
]


def __getattr__(name: str) -> Any:
    if name == "coverage":
        warnings.warn("lightning_lowbit.kernels.coverage is now kernel_support", DeprecationWarning, stacklevel=2)
        return kernel_support
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
