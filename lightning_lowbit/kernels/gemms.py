"""GEMMs of codes with scales of blocks, on the integer units of CPUs.

With codes c, scales s of blocks (1 for none), and the steps u that elements are multiples of:

    y[i, j] = Σ_b  s_x[i, b] · (s_w[j, b] · Σ_k c_x[i, k] · c_w[j, k])        k in block b, summed exactly as integers
    Y = y · (u_x · u_w) · factor_x · factor_w + bias                        rounded once to the result's dtype

The sum over b goes through the blocks in their order, by fused multiply-adds in float32: all CPUs, instructions and
numbers of threads give the same bits.
"""

from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from lightning_lowbit._torch import has_dispatch_mode
from lightning_lowbit.kernels.cpu import gemms as cpp
from lightning_lowbit.kernels.memory import Misfit
from lightning_lowbit.kernels.operands import quantize_operand
from lightning_lowbit.kernels.ops import Operation, call_from_specs, run
from lightning_lowbit.kernels.packing import unpack_operand
from lightning_lowbit.kernels.products import plain_scale_and_round
from lightning_lowbit.quant.blocks import tile_of
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import Operand
from lightning_lowbit.quant.packed import Packed, pack, unpacked_codes, unpacked_factor
from lightning_lowbit.quant.transforms import rotate


class CodeOperand(NamedTuple):
    """An operand that its GEMM quantizes or unpacks itself.

    Attributes:
        x: the matrix, or the bytes of a packed one.
        call: the cast of the operand, along dimension ``call.dim``.
        factor: of packed bytes; None for a matrix.
        shape: of the operand as a matrix.
    """

    x: Tensor
    call: CastCall
    factor: Tensor | None
    shape: torch.Size

    def t(self) -> "CodeOperand":
        """Returns itself: its cast names the contraction axis."""
        return self

    def decoded(self, dtype: torch.dtype, contracted: int = 1) -> Operand:
        """Returns the emulation's operand for a pass in ``dtype``, bit for bit; its call knows the axis."""
        x, (cast, dim, key, amax, _, shard, rotation, _), factor, shape = self
        if factor is not None:
            return unpack_operand(Packed(x, factor), cast, dim, shape, dtype)
        return quantize_operand(x, cast, dim, key, amax, None, shard, rotation)

    @property
    def rows(self) -> int:
        return self.shape[1 - self.call.dim]

    @property
    def inner(self) -> int:
        return self.shape[self.call.dim]


def code_operand(x: Tensor, call: CastCall) -> CodeOperand:
    """Returns the operand of a matrix.

    Examples:
        >>> x, w = torch.randn(4, 64), torch.randn(8, 64)
        >>> call = CastCall(Cast("e2m1", Scale("e4m3", 16)), 1)
        >>> multiply(code_operand(x, call), code_operand(w, call), None, torch.float32).shape
        torch.Size([4, 8])
    """
    return CodeOperand(x, call, None, call.shape(x))


def packed_operand(packed: Packed, cast: Cast, dim: int, shape: torch.Size) -> CodeOperand:
    """Returns the operand of the bytes of a matrix of ``shape``."""
    return CodeOperand(packed.data, CastCall(cast, dim), packed.factor, shape)


def multiply(left: CodeOperand, right: CodeOperand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the product ``[left.rows, right.rows]`` in ``dtype``. ``bias`` has one number for each column."""
    if is_compiling() or has_dispatch_mode():
        return _multiply(*_spelled(left), *_spelled(right), bias, dtype)
    return _run(left, right, bias, dtype)


def _run(left: CodeOperand, right: CodeOperand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if left.inner != right.inner:
        raise Misfit(
            f"A GEMM of codes contracts axes of one length, and got {tuple(left.shape)} along dimension "
            f"{left.call.dim} and {tuple(right.shape)} along dimension {right.call.dim}. Give operands that fit each "
            "other."
        )
    if 0 in (left.rows, right.rows, left.inner):
        product = left.x.new_zeros((left.rows, right.rows), dtype=torch.float32)
        return (product if bias is None else product + bias).to(dtype)
    result: Tensor = run(MULTIPLY, left.x, left, right, bias, dtype)
    return result


# What an operator takes in place of an operand.
_Spelled = tuple[Tensor, str, int, Tensor | None, Tensor | None, str | None, Tensor | None, Tensor | None, list[int]]


def _spelled(operand: CodeOperand) -> _Spelled:
    x, (cast, dim, key, amax, _, shard, rotation, _), factor, shape = operand
    return x, cast.spec, dim, key, amax, None if shard is None else shard.spec, rotation, factor, [*shape]


def _read(x: Tensor, spec: str, dim: int, key: Any, amax: Any, shard: str | None, *others: Any) -> CodeOperand:
    rotation, factor, shape = others
    call = call_from_specs(spec, dim, key, amax, None, shard, rotation)
    return CodeOperand(x, call, factor, torch.Size(shape))


@torch.library.custom_op("lightning_lowbit::multiply_codes", mutates_args=())
def _multiply(
    x: Tensor,
    x_cast: str,
    x_dim: int,
    x_key: Tensor | None,
    x_amax: Tensor | None,
    x_shard: str | None,
    x_rotation: Tensor | None,
    x_factor: Tensor | None,
    x_shape: list[int],
    w: Tensor,
    w_cast: str,
    w_dim: int,
    w_key: Tensor | None,
    w_amax: Tensor | None,
    w_shard: str | None,
    w_rotation: Tensor | None,
    w_factor: Tensor | None,
    w_shape: list[int],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Does :func:`multiply` where graphs and counters must see one operator."""
    left = _read(x, x_cast, x_dim, x_key, x_amax, x_shard, x_rotation, x_factor, x_shape)
    right = _read(w, w_cast, w_dim, w_key, w_amax, w_shard, w_rotation, w_factor, w_shape)
    return _run(left, right, bias, dtype)


@_multiply.register_fake
def _(*arguments: Any) -> Tensor:
    x, x_dim, x_shape, w_dim, w_shape, dtype = (arguments[place] for place in (0, 2, 8, 11, 17, 19))
    return x.new_empty((x_shape[1 - x_dim], w_shape[1 - w_dim]), dtype=dtype)


@register_flop_formula(torch.ops.lightning_lowbit.multiply_codes, get_raw=True)
def _flops(*arguments: Any, **_: Any) -> int:
    shape, w_dim, w_shape = arguments[8], arguments[11], arguments[17]
    return 2 * shape[0] * shape[1] * w_shape[1 - w_dim]


def plain_multiply(x: Tensor, left: CodeOperand, right: CodeOperand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Does :func:`multiply` by plain code, one block after the other."""
    (a, scales_a, factor_a), (b, scales_b, factor_b) = _codes(left._replace(x=x)), _codes(right)
    step = gcd(_form(left).block, _form(right).block) or left.inner
    total = torch.zeros(left.rows, right.rows)
    for first in range(0, left.inner, step):
        block = slice(first, first + step)
        whole = (a[:, block].double() @ b[:, block].double().t()).float()
        scaled = whole * scales_b[:, first][None]
        total = _fused(scaled, scales_a[:, first][:, None], total)
    total = total * (_form(left).step * _form(right).step)
    factors = [factor for factor in (factor_a, None if factor_b is None else factor_b.t()) if factor is not None]
    return plain_scale_and_round(total, factors, bias, dtype)


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns a · b + c rounded once to float32: the sum is rounded to odd in float64, which keeps all that counts."""
    product, c = a.double() * b.double(), c.double()  # exact
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    word = total.view(torch.int64)
    is_even = (word & 1) == 0
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & is_even & total.isfinite(), word + toward, word)
    return odd.view(torch.float64).float()


def _codes(operand: CodeOperand) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns whole numbers ``[rows, k]``, scales repeated to that shape, and the factor, ``[rows, 1]`` or 0-d."""
    x, call, factor, shape = operand
    cast, dim = call.cast, call.dim
    if factor is None:
        x = x if call.rotation is None else rotate(x, call.rotation, dim)
        packed = pack(x, cast, call.key, call.amax, None, call.shard, dim)
        x, factor = packed
    codes, scales = unpacked_codes(x, cast, shape.numel())
    elements = cast.format.decode(codes) if codes.dtype == torch.uint8 else codes.float()
    elements = elements.view(shape) / _form(operand).step
    if cast.scale.per_block:
        blocks = [-(-size // side) for size, side in zip(shape, tile_of(cast, dim, 2), strict=True)]
        scales = scales.view(blocks)
        for axis, side in enumerate(tile_of(cast, dim, 2)):
            scales = scales.repeat_interleave(side, axis).narrow(axis, 0, shape[axis])
    else:
        scales = torch.ones(shape)
    factor = unpacked_factor(x[None], factor, cast, shape.numel(), dim)
    if dim == 0:
        elements, scales = elements.t(), scales.t()
    if factor is not None and factor.dim() > 0:
        factor = factor.reshape(-1, 1)
    return elements, scales, factor


def _form(operand: CodeOperand) -> cpp.Form:
    return cpp.form_of(operand.call)


MULTIPLY = Operation("GEMMs of codes", plain_multiply, cpp.multiply)
