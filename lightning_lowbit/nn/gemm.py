"""The GEMMs, emulated: what low-precision tensor cores compute, on any device.

An FP4 element times its block scale is exact in bfloat16 (see ``Cast.fits_bfloat16``), and a product of two such
numbers in float32, so a bfloat16 GEMM over ``codes * scales`` with float32 accumulation is the tensor core's GEMM up to
the order of summation. The scales of the two tensors, and of their rows, stay outside and multiply the accumulated
result in float32, before it is rounded: folded into the operands they would cost exactness.
"""

import math

import torch
from torch import Tensor

from lightning_lowbit.kernels import opaque, within_cast
from lightning_lowbit.quant import Operand

_FLOAT32 = torch.finfo(torch.float32)


def matmul(a: Operand, b: Operand, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``a · b + bias``.

    Args:
        a: ``[m, k]``, its factor 0-d or ``[m, 1]``.
        b: ``[k, n]``, its factor 0-d or ``[1, n]``.
        bias: in ``dtype`` or float32, any shape that broadcasts to ``[m, n]``; or None.
        dtype: of the result.

    Returns:
        ``[m, n]``. Where both operands have ``dtype``, its GEMM is used; otherwise (casts that do not fit bfloat16,
        and exact mode) that of float32, rounded once.
    """
    plain = a.factor is None and b.factor is None and (bias is None or bias.dtype == dtype)
    if plain and a.values.dtype == b.values.dtype == dtype:
        return _matmul(a.values, None, b.values, None, bias, dtype)
    return _opaque_matmul(a.values, a.factor, b.values, b.factor, bias, dtype)


def _matmul(
    left: Tensor,
    left_factor: Tensor | None,
    right: Tensor,
    right_factor: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if left.dtype != dtype or right.dtype != dtype:
        left, right = left.float(), right.float()
    factors = [factor for factor in (left_factor, right_factor) if factor is not None]
    if not factors and left.dtype == dtype and (bias is None or bias.dtype == dtype):
        return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    narrow = bias is None or bias.dtype == dtype  # a float32 product with a mean is added before anything is rounded
    if left.device.type == "cpu" and narrow and all(factor.dim() == 0 for factor in factors):
        # On the CPU reading a number costs nothing, and the GEMM multiplies its float32 result by alpha.
        alpha = math.prod(factor.item() for factor in factors)
        if not _FLOAT32.tiny <= alpha <= _FLOAT32.max:  # though the result may be an ordinary number
            product = torch.mm(left.float(), right.float()).double() * alpha
            return (product if bias is None else product + bias).to(dtype)
        offset = left.new_zeros(()) if bias is None else bias.to(left.dtype)
        return torch.addmm(offset, left, right, alpha=alpha, beta=0 if bias is None else 1).to(dtype)
    if left.dtype in (torch.float32, torch.float64):
        product = torch.mm(left, right)
    elif left.device.type == "cpu":  # has no GEMM that leaves its float32 result unrounded
        product = torch.mm(left, right).float()
    else:
        product = torch.mm(left, right, out_dtype=torch.float32)
    for factor in factors:  # one after the other: their product may leave float32
        product = product * factor
    return (product if bias is None else product + bias).to(dtype)


@opaque(
    lambda left, left_factor, right, right_factor, bias, dtype: left.new_empty((len(left), right.shape[1]), dtype=dtype)
)
def _opaque_matmul(
    left: Tensor,
    left_factor: Tensor | None,
    right: Tensor,
    right_factor: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return _matmul(left, left_factor, right, right_factor, bias, dtype)


@opaque(lambda mean, weight, factor, bias: weight.new_empty((1, weight.shape[1]), dtype=torch.float32))
def mean_times(mean: Tensor, weight: Tensor, factor: Tensor | None, bias: Tensor | None) -> Tensor:
    """``μᵀ · W * factor + bias``: what a mean that was split off adds to every row of a result.

    Args:
        mean: float32 ``[1, k]``.
        weight: ``[k, n]``.
        factor: float32, 0-d, or None.
        bias: ``[n]`` or None.

    Returns:
        float32 ``[1, n]``: it enters all rows alike, so that its rounding would not average out over tokens.
    """
    with within_cast():
        product = mean @ weight.float()
    if factor is not None:
        product = product * factor
    return product if bias is None else product + bias
