"""The GEMMs, emulated: what low-precision tensor cores compute, on any device.

An FP4 element times its block scale is exact in bfloat16 (see ``Cast.fits_bfloat16``), and a product of two such
numbers in float32, so a bfloat16 GEMM over ``codes * scales`` with float32 accumulation is the tensor core's GEMM up to
the order of summation. The scales of the two tensors stay outside and multiply the accumulated result in float32,
before it is rounded: folded into the operands they would cost exactness.
"""

import math

import torch
from torch import Tensor

from lightning_lowbit.quant import Operand

_FLOAT32 = torch.finfo(torch.float32)


def matmul(a: Operand, b: Operand, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``a · b + bias``.

    Args:
        a: ``[m, k]``.
        b: ``[k, n]``.
        bias: ``[n]`` in ``dtype``, or None.
        dtype: of the result.

    Returns:
        ``[m, n]``. Where both operands have ``dtype``, its GEMM is used; otherwise (casts that do not fit bfloat16,
        and exact mode) that of float32, rounded once.
    """
    if torch.compiler.is_compiling() and (a.factor is not None or b.factor is not None):
        return _matmul_op(a.values, a.factor, b.values, b.factor, bias, dtype)
    left, right = a.values, b.values
    if left.dtype != dtype or right.dtype != dtype:
        left, right = left.float(), right.float()
    factors = [operand.factor for operand in (a, b) if operand.factor is not None]
    if not factors and left.dtype == dtype:
        return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    if left.device.type == "cpu":
        # On the CPU reading a number costs nothing, and the GEMM multiplies its float32 result by alpha.
        alpha = math.prod(factor.item() for factor in factors)
        if not _FLOAT32.tiny <= alpha <= _FLOAT32.max:  # though the result may be an ordinary number
            product = torch.mm(left.float(), right.float()).double() * alpha
            return (product if bias is None else product + bias).to(dtype)
        offset = left.new_zeros(()) if bias is None else bias.to(left.dtype)
        return torch.addmm(offset, left, right, alpha=alpha, beta=0 if bias is None else 1).to(dtype)
    product = torch.mm(left, right, out_dtype=torch.float32) if left.dtype != torch.float32 else torch.mm(left, right)
    for factor in factors:  # one after the other: their product may leave float32
        product = product * factor
    return (product if bias is None else product + bias).to(dtype)


@torch.library.custom_op("lightning_lowbit::matmul", mutates_args=())
def _matmul_op(
    a: Tensor, a_factor: Tensor | None, b: Tensor, b_factor: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return matmul(Operand(a, a_factor), Operand(b, b_factor), bias, dtype)


@_matmul_op.register_fake
def _(
    a: Tensor, a_factor: Tensor | None, b: Tensor, b_factor: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
