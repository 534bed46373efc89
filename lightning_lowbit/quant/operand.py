"""An operand of a GEMM: ``elements * scales`` in the GEMM's dtype, with the tensor's scale as a factor.

The derivative of rounding is zero almost everywhere. The gradient of an operand passes straight through to the tensor
(straight-through estimator), or is multiplied by a surrogate, which depends on the place of v = x · e on the grid:

    "trust"   1 where |v| exceeds the largest level by at most half a step, else 0: no gradient through saturated
              values (QuEST, arXiv 2502.05003, section 3.3: trust where the error is at most half a step)
    "dge"     min(|2 r - 1|^(1/k - 1) / k, 3) with r in [0, 1) the place of |v| between its neighbors: the derivative
              of a smooth step, steep in the middle, flat at the levels (arXiv 2501.17116, section 3.1; k = 5)
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.checks import choose
from lightning_lowbit.compilation import opaque
from lightning_lowbit.quant.blocks import from_blocks, tile_of
from lightning_lowbit.quant.call import CastCall, factor_shape, is_rounded
from lightning_lowbit.quant.call import has_factor as has_factor
from lightning_lowbit.quant.call import operand_dtype as operand_dtype
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.rounding import grid_step
from lightning_lowbit.quant.scales import encode_factor
from lightning_lowbit.quant.scaling import make_scales, round_matrix
from lightning_lowbit.quant.shard import Shard

SURROGATES = ("trust", "dge")

_SHARPNESS = 5.0  # k
_LIMIT = 3.0  # the derivative is infinite half-way between two levels


class Operand(NamedTuple):
    """One operand of a GEMM: ``values`` ``[rows, columns]`` times ``factor``, which is float32, 0-d, ``[rows, 1]`` or
    ``[1, columns]``, or None for 1. It is constant along the contraction axis and therefore multiplies the result."""

    values: Tensor
    factor: Tensor | None = None

    def t(self) -> "Operand":
        factor = self.factor
        return Operand(self.values.t(), factor if factor is None or factor.dim() == 0 else factor.t())


class StackOperand(NamedTuple):
    """The operands of all products of a stack, such as those of experts.

    ``values`` are matrices ``[products, rows, columns]``; with ``ends``, where the rows of each product end, the rows
    of all of them, ``[rows, columns]``. ``factor`` is as of an :class:`Operand` for each product, float32
    ``[products]``, ``[products, rows, 1]`` or ``[products, 1, columns]``; with ``ends`` one number for each row
    ``[rows, 1]``.
    """

    values: Tensor
    factor: Tensor | None = None
    ends: tuple[int, ...] | None = None

    def t(self) -> "StackOperand":
        """Returns the operands of the transposed matrices."""
        factor = self.factor
        return StackOperand(self.values.mT, factor if factor is None or factor.dim() == 1 else factor.mT, self.ends)

    def decoded(self, dtype: torch.dtype) -> Operand:
        """Returns the values and the factor as they are: their dtype is that of the pass."""
        return Operand(self.values, self.factor)

    def products(self) -> list[Operand]:
        """Returns the operand of each product."""
        values, factor, sizes = self.values, self.factor, None
        if self.ends is not None:
            sizes = [end - start for start, end in pairwise((0, *self.ends))]
        matrices = values.unbind() if sizes is None else torch.split(values, sizes)
        if factor is None:
            return [Operand(matrix) for matrix in matrices]
        factors = factor.unbind() if sizes is None or factor.dim() != 2 else torch.split(factor, sizes)
        return [Operand(*pair) for pair in zip(matrices, factors, strict=True)]


def quantize_operand(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    shard: Shard | None = None,
) -> Operand:
    """Quantizes one operand of a GEMM to ``elements * scales``, with scales per row or tensor in the factor.

    Args:
        x: ``[rows, columns]`` in the GEMM's dtype.
        cast, dim, key, amax: as in :func:`lightning_lowbit.quantize`.
        dtype: of the values, which it must hold exactly: float32, or ``cast.grid.gemm_dtype`` for scales per row or
            tensor. None takes that of ``x`` if the cast fits bfloat16 or has ``round_to_bfloat16``, else float32.
        shard: the shard that ``x`` is; it gets the global matrix's scales and random bits. All processes that hold one
            must call this together. A ValueError if a shard boundary splits a block.
    """
    call = CastCall(cast, dim, key, amax, dtype, shard)
    if torch.compiler.is_compiling():
        spec = None if shard is None else shard.spec
        values, factor = plain_operand(x, cast.spec, dim, key, amax, call.values_dtype(x.dtype), spec)
        return Operand(values, factor if has_factor(cast) else None)
    return make_operand(x, call)


def empty_operand(x: Tensor, call: CastCall) -> Operand:
    """Memory for an operand of a matrix: its values and, where there is one, its factor."""
    shape = call.shape(x)
    order = (1, 0) if call.is_across(x) else (0, 1)
    values = torch.empty_permuted(shape, order, dtype=call.values_dtype(x.dtype), device=x.device)
    if not has_factor(call.cast):
        return Operand(values)
    return Operand(values, x.new_empty(factor_shape(shape, call.cast, call.dim), dtype=torch.float32))


def make_operand(x: Tensor, call: CastCall) -> Operand:
    """:func:`quantize_operand` of a matrix that is not rotated: the specification of kernels."""
    cast, dtype = call.cast, call.values_dtype(x.dtype)
    rounded = x.dtype if is_rounded(x.dtype, cast) else dtype  # even if ``dtype`` is float32
    scaled, values = round_matrix(x, call, scaled=cast.scale.per_block, dtype=rounded)
    values = values.to(dtype)
    values = values.t().contiguous().t() if call.is_across(x) else values.contiguous()
    if not has_factor(cast):
        return Operand(values)
    factor = scaled.factor(x.shape, tile_of(cast, call.dim, 2))
    if not cast.scale.per_block:
        factor = (scaled.stored(cast) * factor).reshape(factor_shape(x.shape, cast, call.dim))
    return Operand(values, factor)


def _empty_tensors(
    x: Tensor, spec: str, dim: int, key: Tensor | None, amax: Tensor | None, dtype: torch.dtype, shard: str | None
) -> tuple[Tensor, Tensor]:
    values, factor = empty_operand(x, CastCall(Cast.from_spec(spec), dim, dtype=dtype))
    return values, x.new_empty((), dtype=torch.float32) if factor is None else factor


@opaque(_empty_tensors)
def plain_operand(
    x: Tensor, spec: str, dim: int, key: Tensor | None, amax: Tensor | None, dtype: torch.dtype, shard: str | None
) -> tuple[Tensor, Tensor]:
    """:func:`make_operand` as an operator of compiled graphs, where a factor is always a tensor."""
    part = None if shard is None else Shard.from_spec(shard)
    values, factor = make_operand(x, CastCall(Cast.from_spec(spec), dim, key, amax, dtype, part))
    return values, x.new_ones((), dtype=torch.float32) if factor is None else factor


def blend(x: Tensor, quantized: Operand, share: Tensor, exact: bool = False) -> Operand:
    """Returns ``x + λ (q - x)``: an operand between high precision and its quantized values q (annealing).

    ``share`` is λ in [0, 1], 0-d float32. 0 gives ``x`` to the bit where q is finite; 1 gives q, rounded once to the
    dtype of ``x``. With ``exact`` the values are float32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32) if exact else x.dtype
    return Operand(_blend(x, quantized.values, quantized.factor, share, dtype))


@opaque(lambda x, values, factor, share, dtype: x.new_empty(x.shape, dtype=dtype))
def _blend(x: Tensor, values: Tensor, factor: Tensor | None, share: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x, values = x.to(wide), values.to(wide)
    return torch.lerp(x, values if factor is None else values * factor, share.to(wide)).to(dtype).contiguous()


def scaled_elements(x: Tensor, cast: Cast, dim: int, amax: Tensor | None = None, shard: Shard | None = None) -> Tensor:
    """Elements in units of their scales, before rounding: float32, the shape of ``x``."""
    scaled = make_scales(x, CastCall(cast, dim, amax=amax, shard=shard))
    factor = encode_factor(scaled.scales, scaled.decode, cast)
    return from_blocks(scaled.blocks.float() * factor, x.shape, tile_of(cast, dim, 2))


def surrogate_factor(kind: str, x: Tensor, cast: Cast, dim: int, amax: Tensor | None = None) -> Tensor:
    """Returns the factor of the quantized matrix's gradient, float32, by a ``kind`` of ``SURROGATES``.

    The other arguments are those of :func:`quantize_operand`. Where a scale is 0, all elements but zeros count as
    saturated.
    """
    return _factor(choose("surrogate", kind, SURROGATES), x, cast.spec, dim, amax, None)


def through_rounding(
    gradient: Tensor, kind: str, x: Tensor, cast: Cast, dim: int, amax: Tensor | None = None, shard: Shard | None = None
) -> Tensor:
    """Turns the gradient of quantized values into that of ``x``: multiplied in float32, rounded once."""
    spec = None if shard is None else shard.spec
    return _through_rounding(gradient, choose("surrogate", kind, SURROGATES), x, cast.spec, dim, amax, spec)


@opaque(lambda gradient, kind, x, spec, dim, amax, shard: torch.empty_like(gradient))
def _through_rounding(
    gradient: Tensor, kind: str, x: Tensor, spec: str, dim: int, amax: Tensor | None, shard: str | None
) -> Tensor:
    return (gradient * _factor(kind, x, spec, dim, amax, shard)).to(gradient.dtype)


@opaque(lambda kind, x, spec, dim, amax, shard: x.new_empty(x.shape, dtype=torch.float32))
def _factor(kind: str, x: Tensor, spec: str, dim: int, amax: Tensor | None, shard: str | None) -> Tensor:
    cast, part = Cast.from_spec(spec), None if shard is None else Shard.from_spec(shard)
    magnitude = scaled_elements(x, cast, dim, amax, part).abs()
    largest = torch.full_like(magnitude, cast.format.max)
    if kind == "trust":
        return (magnitude <= largest + grid_step(largest, cast.format) / 2).float()
    magnitude = torch.minimum(magnitude, largest)
    step = grid_step(magnitude, cast.format)
    place = torch.remainder(magnitude, step) / step
    return ((2 * place - 1).abs() ** (1 / _SHARPNESS - 1) / _SHARPNESS).clamp(max=_LIMIT)
