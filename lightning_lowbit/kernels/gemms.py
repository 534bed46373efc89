"""GEMMs of codes with scales of blocks, on the integer units of CPUs.

With codes c, scales s of blocks (1 for none), and the steps u that elements are multiples of:

    y[i, j] = Σ_b  s_x[i, b] · (s_w[j, b] · Σ_k c_x[i, k] · c_w[j, k])        k in block b, summed exactly as integers
    Y = y · (u_x · u_w) · factor_x · factor_w + bias                        rounded once to the result's dtype

The sum over b goes through the blocks in their order, by fused multiply-adds in float32: all CPUs, instructions and
numbers of threads give the same bits.

A stack of products, such as those of experts, is one call: each has the bits that it has alone.

    Y[rows of e] = X[rows of e] · W[e]ᵀ + bias[e]        a grouped operand, contracted along its columns, and a stack
    Y[e] = X[rows of e]ᵀ · G[rows of e]                  two grouped operands, contracted along their rows
"""

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from lightning_lowbit._torch import has_dispatch_mode
from lightning_lowbit.kernels.cpu import gemms as cpp
from lightning_lowbit.kernels.layout import blocks_of, repeated
from lightning_lowbit.kernels.memory import Misfit
from lightning_lowbit.kernels.operands import quantize_operand
from lightning_lowbit.kernels.ops import Operation, call_from_specs, run
from lightning_lowbit.kernels.packing import unpack_operand
from lightning_lowbit.kernels.products import plain_scale_and_round
from lightning_lowbit.kernels.windows import Pixels
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
        shape: of the operand as a matrix, or a stack of them. A grouped one that is rotated along its rows is padded
            product by product, which the shape does not count.
        ends: of a grouped operand, where the rows of each product end; None for others.
        pixels: of images, whose patches are the operand, where ``x`` has their pixels; None for others.
    """

    x: Tensor
    call: CastCall
    factor: Tensor | None
    shape: torch.Size
    ends: tuple[int, ...] | None = None
    pixels: Pixels | None = None

    def t(self) -> "CodeOperand":
        """Returns itself: its cast names the contraction axis."""
        return self

    def decoded(self, dtype: torch.dtype, contracted: int = 1) -> Operand:
        """Returns the emulation's operand for a pass in ``dtype``, bit for bit; its call knows the axis."""
        x, (cast, dim, key, amax, _, shard, rotation, _), factor, shape, _, _ = self.gathered()
        if factor is not None:
            return unpack_operand(Packed(x, factor), cast, dim, shape, dtype)
        return quantize_operand(x, cast, dim, key, amax, None, shard, rotation)

    def gathered(self) -> "CodeOperand":
        """Returns the operand of the patches themselves, with the same codes and scales."""
        return self if self.pixels is None else code_operand(self.pixels.gather(self.x), self.call)

    @property
    def is_stack(self) -> bool:
        """Whether it has the matrices of several products."""
        return self.ends is not None or len(self.shape) == 3

    @property
    def rows(self) -> int:
        return self.shape[-1 - self.call.dim]

    @property
    def inner(self) -> int:
        return self.shape[self.call.dim - 2]

    def products(self) -> list["CodeOperand"]:
        """Returns the operand of each product of a stack."""
        matrices = self.x.unbind() if self.ends is None else split_rows(self.x, self.ends)
        return [code_operand(matrix, self.call.of_product(i)) for i, matrix in enumerate(matrices)]


def split_rows(x: Tensor, ends: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns the rows of each product of a stack, of which the last ends where ``x`` does."""
    return torch.split(x, [end - start for start, end in pairwise((0, *ends))])


def code_operand(x: Tensor, call: CastCall, pixels: Pixels | None = None) -> CodeOperand:
    """Returns the operand of a matrix; with ``pixels``, of patches of images.

    Args:
        x: the matrix; or the pixels of the images, if quantizing these gives the codes and scales of the patches.

    Examples:
        >>> x, w = torch.randn(4, 64), torch.randn(8, 64)
        >>> call = CastCall(Cast("e2m1", Scale("e4m3", 16)), 1)
        >>> multiply(code_operand(x, call), code_operand(w, call), None, torch.float32).shape
        torch.Size([4, 8])
    """
    shape = call.shape(x) if pixels is None else pixels.patches_shape
    return CodeOperand(x, call, None, shape, None, pixels)


def stack_operand(x: Tensor, call: CastCall, ends: Sequence[int]) -> CodeOperand:
    """Returns the operand of all products of a stack.

    Args:
        x: the matrices, ``[products, rows, columns]``; or, grouped, their rows in one matrix.
        call: of each product; its key has one number for each, and so has a rotation that is not the same for all.
        ends: ascending, where the rows of each product end in grouped operands; the last one is their number of rows.

    Examples:
        >>> x, w = torch.randn(10, 64), torch.randn(3, 8, 64)
        >>> call = CastCall(Cast("e2m1", Scale("e4m3", 16)), 1)
        >>> pair = (stack_operand(matrices, call, [3, 3, 10]) for matrices in (x, w))
        >>> multiply(*pair, None, torch.float32).shape
        torch.Size([10, 8])
    """
    return CodeOperand(x, call, None, call.stack_shape(x), tuple(ends) if x.dim() == 2 else None)


def packed_operand(packed: Packed, cast: Cast, dim: int, shape: torch.Size) -> CodeOperand:
    """Returns the operand of the bytes of a matrix of ``shape``."""
    return CodeOperand(packed.data, CastCall(cast, dim), packed.factor, shape)


def multiply(
    left: CodeOperand,
    right: CodeOperand,
    bias: Tensor | None,
    dtype: torch.dtype,
    through: torch.dtype | None = None,
) -> Tensor:
    """Returns the product ``[left.rows, right.rows]`` in ``dtype``, rounded to ``through`` where that is another one.
    ``bias`` has one number for each column.

    Of a stack it returns the rows of all products, if ``left`` is contracted along its columns, with a bias
    ``[products, columns]``; else ``[products, left.rows, right.rows]``, without a bias.

    Raises:
        ValueError: operands do not fit each other.
    """
    if is_compiling() or has_dispatch_mode():
        ends = None if left.ends is None else [*left.ends]
        pixels = None if left.pixels is None else left.pixels.numbers
        return _multiply(*_spelled(left), *_spelled(right), bias, dtype, ends, pixels, through)
    return _run(left, right, bias, dtype, through)


def _run(
    left: CodeOperand, right: CodeOperand, bias: Tensor | None, dtype: torch.dtype, through: torch.dtype | None
) -> Tensor:
    if left.inner != right.inner:
        raise Misfit(
            f"A GEMM of codes contracts axes of one length, and got {tuple(left.shape)} along dimension "
            f"{left.call.dim} and {tuple(right.shape)} along dimension {right.call.dim}. Give operands that fit each "
            "other."
        )
    if left.is_stack or right.is_stack:
        _check_stack(left, right, left.ends or (), bias)
    left, right = _with_scales(left), _with_scales(right)
    if 0 in (left.rows, right.rows, left.inner):
        if left.ends is not None:
            return _products_one_by_one(left, right, bias, dtype, through)
        product = left.x.new_zeros((left.rows, right.rows), dtype=torch.float32)
        return (product if bias is None else product + bias).to(through or dtype).to(dtype)
    if left.pixels is not None and not cpp.takes_pixels(left, right):
        left = left.gathered()
    return run(MULTIPLY, left.x, left, right, bias, dtype, through)


def _with_scales(operand: CodeOperand) -> CodeOperand:
    """Packs an operand whose scales depend on other processes: each process reduces them once, whatever code multiplies
    its part, and also where that is empty."""
    x, call, factor, _, ends, _ = operand
    if factor is not None or call.shard is None or ends is not None or x.dim() != 2 or call.stands_alone():
        return operand
    operand = operand.gathered()
    x = operand.x if call.rotation is None else rotate(operand.x, call.rotation, call.dim)
    data, factor = pack(x, call.cast, call.key, call.amax, None, call.shard, call.dim)
    return operand._replace(x=data, factor=factor)


def _check_stack(left: CodeOperand, right: CodeOperand, ends: tuple[int, ...], bias: Tensor | None) -> None:
    """Raises a ``Misfit`` for operands that are not those of so many products."""
    products, starts = len(ends), (0, *ends)
    is_ascending = products > 0 and all(start <= end for start, end in pairwise(starts)) and ends[-1] == len(left.x)
    along_rows = left.call.dim == right.call.dim == 0 and right.ends == ends and bias is None
    along_columns = left.call.dim == 1 and right.x.dim() == 3 and len(right.x) == products
    along_columns &= bias is None or bias.shape == (products, right.rows)
    calls = left.call, right.call
    has_keys = all(not call.cast.draws or call.key is None or call.key.shape == (products,) for call in calls)
    signs = [call.rotation for call in calls if call.rotation is not None]
    has_signs = all(one.dim() == 1 or len(one) == products for one in signs)
    if not (is_ascending and (along_rows or along_columns) and has_keys and has_signs):
        sides = " and ".join(f"{tuple(side.shape)} along {side.call.dim}" for side in (left, right))
        raise Misfit(
            f"A stack of {products} products takes ascending ends of all rows, and a matrix, a bias, a key and signs "
            f"for each; got ends {ends}, operands {sides}, a bias {None if bias is None else tuple(bias.shape)}. Make "
            "both by stack_operand."
        )


def _products_one_by_one(
    left: CodeOperand, right: CodeOperand, bias: Tensor | None, dtype: torch.dtype, through: torch.dtype | None
) -> Tensor:
    pairs = zip(left.products(), right.products(), strict=True)
    results = [_run(a, b, None if bias is None else bias[i], dtype, through) for i, (a, b) in enumerate(pairs)]
    return torch.cat(results) if left.call.dim == 1 else torch.stack(results)


def _spelled(operand: CodeOperand) -> tuple[Any, ...]:
    """Returns what an operator takes in place of an operand."""
    x, (cast, dim, key, amax, _, shard, rotation, _), factor, shape, _, _ = operand
    return x, cast.spec, dim, key, amax, None if shard is None else shard.spec, rotation, factor, [*shape]


def _read(x: Tensor, spec: str, dim: int, key: Any, amax: Any, shard: str | None, *others: Any) -> CodeOperand:
    rotation, factor, shape, ends = others
    call = call_from_specs(spec, dim, key, amax, None, shard, rotation)
    return CodeOperand(x, call, factor, torch.Size(shape), None if ends is None or x.dim() == 3 else tuple(ends))


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
    ends: list[int] | None,
    pixels: list[int] | None,
    through: torch.dtype | None,
) -> Tensor:
    """Does :func:`multiply` where graphs and counters must see one operator."""
    left = _read(x, x_cast, x_dim, x_key, x_amax, x_shard, x_rotation, x_factor, x_shape, ends)
    right = _read(w, w_cast, w_dim, w_key, w_amax, w_shard, w_rotation, w_factor, w_shape, ends)
    if pixels is not None:
        left = left._replace(pixels=Pixels.from_numbers(pixels))
    return _run(left, right, bias, dtype, through)


@_multiply.register_fake
def _(*arguments: Any) -> Tensor:
    x, x_dim, x_shape, w_dim, w_shape, dtype, ends = (arguments[place] for place in (0, 2, 8, 11, 17, 19, 20))
    stack = [] if ends is None or x_dim == 1 else [len(ends)]
    return x.new_empty((*stack, x_shape[1 - x_dim], w_shape[-1 - w_dim]), dtype=dtype)


@register_flop_formula(torch.ops.lightning_lowbit.multiply_codes, get_raw=True)
def _flops(*arguments: Any, **_: Any) -> int:
    shape, w_dim, w_shape = arguments[8], arguments[11], arguments[17]
    return 2 * shape[0] * shape[1] * w_shape[-1 - w_dim]


def plain_multiply(
    x: Tensor,
    left: CodeOperand,
    right: CodeOperand,
    bias: Tensor | None,
    dtype: torch.dtype,
    through: torch.dtype | None = None,
) -> Tensor:
    """Does :func:`multiply` by plain code, one product and one block after the other."""
    if left.ends is not None:
        return _products_one_by_one(left._replace(x=x), right, bias, dtype, through)
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
    return plain_scale_and_round(total, factors, bias, through or dtype).to(dtype)


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
    x, call, factor, shape, _, _ = operand.gathered()
    cast, dim = call.cast, call.dim
    if factor is None:
        x = x if call.rotation is None else rotate(x, call.rotation, dim)
        packed = pack(x, cast, call.key, call.amax, None, call.shard, dim)
        x, factor = packed
    codes, scales = unpacked_codes(x, cast, shape.numel())
    elements = cast.format.decode(codes) if codes.dtype == torch.uint8 else codes.float()
    elements = elements.view(shape) / _form(operand).step
    if cast.scale.per_block:
        scales = repeated(scales.view(blocks_of(cast, dim, shape)), shape[0], shape[1], *tile_of(cast, dim, 2))
    else:
        scales = torch.ones(shape)
    factor = unpacked_factor(x[None], factor, cast, shape.numel(), dim)
    if dim == 0:
        elements, scales = elements.t(), scales.t()
    if factor is not None and factor.dim() > 0:
        factor = factor.reshape(-1, 1)
    return elements, scales, factor


def _form(operand: CodeOperand) -> cpp.Form:
    return cpp.form_of(operand.call.cast.spec, operand.call.dim)


MULTIPLY = Operation("GEMMs of codes", plain_multiply, cpp.multiply)
