"""The GEMMs: an emulation of low-precision tensor cores that runs on any device, and native ones.

An FP4 element times its block scale is exact in bfloat16 (see ``Cast.fits_bfloat16``), so a bfloat16 GEMM over
``codes * scales`` with float32 accumulation equals the tensor core's GEMM up to the order of summation. Scales of
tensors and rows multiply the float32 result before it is rounded; folded into the operands they would make them
inexact.

FP8 operands with such scales go to the tensor cores (``scaled_mm``), of whose sums Hopper keeps 14 bits with
fast accumulation; integer and ternary ones go to int8 units (``int_mm``), which sum exactly in int32. Codes and
the scales of their blocks go to block-scaled tensor cores (:mod:`lightning_lowbit.nn.native`).
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_lowbit._torch.devices import multiplies_to_float32
from lightning_lowbit.compilation import opaque, within_cast
from lightning_lowbit.kernels.gemms import CodeOperand, multiply
from lightning_lowbit.nn.native.devices import native_obstacle as native_obstacle
from lightning_lowbit.nn.native.gemms import block_product, finish, fp8_product, int8_product, results
from lightning_lowbit.nn.native.grouped import grouped_product
from lightning_lowbit.nn.native.operand import AnyOperand, BlockOperand, values_of
from lightning_lowbit.quant.operand import StackOperand
from lightning_lowbit.units import lacks_units

_TINY, _MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ONE_BYTE = frozenset((*_FP8, torch.int8))

# Up to this inner size int32 holds the sum of products of int8 values, which are at most 127 · 127.
_LONGEST = (2**31 - 1) // 127**2

_NOTHING = nullcontext()


def no_autocast(device_type: str) -> AbstractContextManager[None]:
    """Switches autocast off. ``torch.autocast(device_type, enabled=False)`` takes longer to enter than a small GEMM."""
    if not torch.is_autocast_enabled(device_type):
        return _NOTHING
    if torch.compiler.is_compiling():
        return torch.autocast(device_type, enabled=False)
    return _SwitchedOff(device_type)


class _SwitchedOff(AbstractContextManager[None]):
    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.device_type, True)


def matmul(
    a: AnyOperand,
    b: AnyOperand,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = False,
    stored: torch.dtype | None = None,
) -> Tensor:
    """Computes ``a · b + bias``, ``[m, n]``, rounded once to ``dtype``: native for FP8, int8 and codes with block
    scales, else in ``dtype``, or in float32 on CPUs without instructions for it.

    Args:
        a: ``[m, k]``, its factor 0-d or ``[m, 1]``; or codes and scales, or what a CPU makes them of; perhaps a stack.
        b: ``[k, n]``, its factor 0-d or ``[1, n]``; or codes and scales ``[n, k]`` where those of ``a`` are.
        bias: in ``dtype`` or float32, any shape that broadcasts to ``[m, n]``; or None.
        fast_accumulation: for native FP8 GEMMs: keeps sums in the tensor cores, faster and less exact.
        stored: a wider dtype in which the caller needs the numbers of ``dtype``, and may get them: a copy less.
    """
    if isinstance(a, CodeOperand) and isinstance(b, CodeOperand):
        return _code_matmul(a, b, bias, dtype, stored)
    if isinstance(a, BlockOperand) and isinstance(b, BlockOperand):
        operands = (a.values, a.scales, a.factor, b.values, b.scales, b.factor)
        return _block_matmul(*operands, bias, dtype, a.kind, a.size[0], b.size[0], a.size[1])
    if isinstance(a, StackOperand) and isinstance(b, StackOperand):
        return grouped_product(a, b, bias, dtype)
    a, b = values_of(a), values_of(b)
    left, right = a.values, b.values
    if left.dtype in _ONE_BYTE or right.dtype in _ONE_BYTE:
        if left.dtype in _FP8 and right.dtype in _FP8:
            return _fp8_matmul(left, a.factor, right, b.factor, bias, dtype, fast_accumulation)
        if left.dtype != right.dtype:  # one of them is an operand of a native GEMM
            left, right = (x.to(dtype) if x.dtype in _ONE_BYTE else x for x in (left, right))
        elif len(right) <= _LONGEST:
            return _int8_matmul(left, a.factor, right, b.factor, bias, dtype)
    if left.dtype == right.dtype == dtype and a.factor is None and b.factor is None and not lacks_units(left):
        if bias is None:
            return torch.mm(left, right)
        if bias.dtype == dtype:
            return torch.addmm(bias, left, right)
    return _emulated_matmul(left, a.factor, right, b.factor, bias, dtype)


def _code_matmul(
    a: CodeOperand, b: CodeOperand, bias: Tensor | None, dtype: torch.dtype, stored: torch.dtype | None
) -> Tensor:
    """Multiplies codes on a CPU. A bias for each row comes after a product in float32."""
    if bias is None or a.ends is not None or bias.numel() == b.rows:
        is_wide = stored == torch.float32 and dtype == torch.bfloat16
        return multiply(a, b, bias, torch.float32 if is_wide else dtype, dtype)
    return finish(multiply(a, b, None, torch.float32), [], bias, dtype)


def _empty(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)  # len() would fix the number of rows in a graph


@opaque(lambda left, left_factor, right, right_factor, bias, dtype: _empty(left, right, dtype))
def _int8_matmul(
    left: Tensor,
    left_factor: Tensor | None,
    right: Tensor,
    right_factor: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiplies int8 values natively."""
    return int8_product((left, right), (left_factor, right_factor), bias, dtype)


@opaque(lambda left, left_factor, right, right_factor, bias, dtype: _empty(left, right, dtype))
def _emulated_matmul(
    left: Tensor,
    left_factor: Tensor | None,
    right: Tensor,
    right_factor: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiplies dequantized values, in ``dtype`` if that is theirs and its products are, else in float32."""
    factors = [factor for factor in (left_factor, right_factor) if factor is not None]
    if left.dtype != dtype or right.dtype != dtype or lacks_units(left):
        left, right = left.float(), right.float()
    is_narrow = bias is None or bias.dtype == dtype  # a float32 product with a mean is added before rounding
    if left.is_cpu and is_narrow and not any(map(Tensor.dim, factors)):
        # On the CPU, reading a number is free, and the GEMM multiplies its float32 result by alpha.
        alpha = math.prod(map(Tensor.item, factors))
        if not _TINY <= alpha <= _MAX:  # the result may still be an ordinary number
            product = torch.mm(left.float(), right.float()).double() * alpha
            return (product if bias is None else product + bias).to(dtype)
        if bias is not None:
            return torch.addmm(bias.to(left.dtype), left, right, alpha=alpha).to(dtype)
        if alpha == 1:
            return torch.mm(left, right).to(dtype)
        # Memory of the result's shape, which is not read: anything smaller would be expanded first.
        return torch.addmm(_empty(left, right, left.dtype), left, right, alpha=alpha, beta=0).to(dtype)
    if left.dtype in (torch.float32, torch.float64) or left.is_cpu:
        product = torch.mm(left, right)  # the CPU has no GEMM that leaves its float32 result unrounded
    elif len(right) and multiplies_to_float32(left.device):
        product = torch.mm(left, right, out_dtype=torch.float32)
    else:
        product = torch.mm(left.float(), right.float())
    return finish(product, factors, bias, dtype)


@opaque(lambda left, left_factor, right, right_factor, bias, dtype, fast: _empty(left, right, dtype))
def _fp8_matmul(
    left: Tensor,
    left_factor: Tensor | None,
    right: Tensor,
    right_factor: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Multiplies FP8 values natively."""
    return fp8_product((left, right), (left_factor, right_factor), bias, dtype, fast)


@opaque(
    lambda left, left_scales, left_factor, right, right_scales, right_factor, bias, dtype, kind, rows, columns, inner: (
        left.new_empty((rows, columns), dtype=dtype)
    )
)
def _block_matmul(
    left: Tensor,
    left_scales: Tensor,
    left_factor: Tensor | None,
    right: Tensor,
    right_scales: Tensor,
    right_factor: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    kind: str,
    rows: int,
    columns: int,
    inner: int,
) -> Tensor:
    """Multiplies two block operands natively. An operator of its own: torch 2.13 does not lower swizzled scales."""
    a = BlockOperand(left, left_scales, left_factor, kind, (rows, inner))
    b = BlockOperand(right, right_scales, right_factor, kind, (columns, inner))
    wide = torch.float32 in results(kind)  # where it is not, bias and factors come after a rounding to bfloat16
    product, factors = block_product(a, b, torch.float32 if bias is not None and wide else dtype)
    return finish(product, factors, bias, dtype)


@opaque(lambda mean, weight, factor, bias: weight.new_empty((1, weight.shape[1]), dtype=torch.float32))
def mean_times(mean: Tensor, weight: Tensor, factor: Tensor | None, bias: Tensor | None) -> Tensor:
    """Computes ``μᵀ · W * factor + bias``, ``[1, n]``: what a mean that was split off adds to every row of a result.
    It stays in float32: it enters all rows alike, and its rounding would not average out over tokens."""
    with within_cast():
        product = mean @ weight.float()
    if factor is not None:
        product = product * factor
    return product if bias is None else product + bias
