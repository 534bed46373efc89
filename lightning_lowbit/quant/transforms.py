"""What is taken from a matrix before it is quantized, and stays in high precision: its mean, or its magnitudes.

Mean      Activations and gradients often share one direction over all tokens, which holds most of their outliers
          (Averis, arXiv 2603.10444). Without it, quantized values resolve the differences between tokens.
Smoothing One outlier channel enlarges the scale of the whole tensor, and all others underflow. Powers of two, which are
          divided out elsewhere in the GEMM, give every channel (or token) an amax between 1/2 and 1 without rounding
          (Smooth-SwiGLU, arXiv 2409.12517, section 4.4).
"""

import torch
from torch import Tensor

from lightning_lowbit.compilation import opaque
from lightning_lowbit.quant.scales import binary_exponent, block_amax, power_of_two

# Factors and products stay far from the ends of float32's and bfloat16's range. In float16 the factors and their
# reciprocals are just normal numbers.
_LIMIT, _FLOAT16_LIMIT = 64, 14


@opaque(lambda x: (torch.empty_like(x), x.new_empty((1, x.shape[1]), dtype=torch.float32)))
def split_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Splits ``[tokens, features]`` into ``X - 1 μᵀ``, in the dtype of ``x``, and ``μᵀ``, float32 ``[1, features]``."""
    mean = x.sum(0, keepdim=True, dtype=torch.float32) / max(len(x), 1)
    return (x.float() - mean).to(x.dtype), mean


@opaque(lambda x, dim: x.new_empty([*x.shape[:dim], 1, *x.shape[dim:][1:]], dtype=torch.float32))
def amax_along(x: Tensor, dim: int) -> Tensor:
    """max|x| along a dimension, which keeps the size 1: float32, 0 without elements."""
    return block_amax(x, (dim % x.dim(),))


def smoothing_factor(amax: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``1 / amax``, rounded down to a power of two from 2^-64 to 2^64, in float16 from 2^-14 to 2^14.

    Where ``amax`` (float32, any shape, 0 or more) is 0 or not finite, the factor is 1.
    """
    limit = _FLOAT16_LIMIT if dtype == torch.float16 else _LIMIT
    exponent, mantissa = binary_exponent(amax)
    factor = power_of_two((-exponent - (mantissa > 1).to(torch.int32)).clamp(-limit, limit))
    return torch.where(torch.isfinite(amax) & (amax > 0), factor, 1.0).to(dtype)
