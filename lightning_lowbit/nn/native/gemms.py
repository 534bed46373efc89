"""Block-scaled native GEMMs: operands in the layouts that ``torch.nn.functional.scaled_mm`` takes, and its results.

All are "TN": both operands have the contraction axis in their rows of memory, so those of dgrad and wgrad that lie
across it are transposed physically (:mod:`.operand`). Sizes are padded with zeros, whose products are zero.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from lightning_lowbit.compilation import counted_as
from lightning_lowbit.nn.native.layout import outer_major, pack_codes, pad, round_up, swizzle
from lightning_lowbit.nn.native.operand import BlockOperand, has_tiles, repeated
from lightning_lowbit.nn.native.table import NATIVE

_RECIPES = {"nvfp4": ScalingType.BlockWise1x16, "mxfp4": ScalingType.BlockWise1x32, "mxfp8": ScalingType.BlockWise1x32}


class Demands(NamedTuple):
    """What a GEMM asks of sizes: multiples of rows, columns and the contraction axis."""

    rows: int
    columns: int
    inner: int


def demands(kind: str, tiles: bool = False, amd: bool = False) -> Demands:
    """The multiples to which sizes are padded; with ``tiles``, the right operand has scales of 128 x 128."""
    if amd:
        return Demands(32, 32, 128)
    if kind == "fp8-blockwise":
        return Demands(16, 128 if tiles else 16, 128)
    # A row of memory is a multiple of 16 bytes, which are 32 elements of 4 bits.
    return Demands(1, 16, 32)


def results(kind: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a GEMM gives on this machine's kind of GPU; AMD's gives no float32."""
    return tuple(dtype for dtype in NATIVE[kind].results if torch.version.hip is None or dtype != torch.float32)


def block_product(left: BlockOperand, right: BlockOperand, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The product ``[rows, columns]`` of ``[rows, k]`` and ``[columns, k]``, and the factors that it lacks.

    ``dtype`` is that of the result if nothing is left to be done with it. If factors are left it is float32, or
    ``dtype`` where the GEMM gives no float32.
    """
    kind, (rows, inner), columns = left.kind, left.values.shape, len(right.values)
    inside = kind == "nvfp4"  # its GEMM multiplies the product of two factors in
    factors = [] if inside else [factor for factor in (left.factor, right.factor) if factor is not None]
    if factors and torch.float32 in results(kind):
        dtype = torch.float32
    if 0 in (rows, inner, columns):
        return left.values.new_zeros((rows, columns), dtype=dtype), factors
    with counted_as(rows, inner, columns):
        product = _scaled_mm(left, right, dtype)[:rows, :columns]
    return product.contiguous(), factors


def _scaled_mm(left: BlockOperand, right: BlockOperand, dtype: torch.dtype) -> Tensor:
    kind, amd = left.kind, torch.version.hip is not None
    if kind == "fp8-blockwise":
        return _of_blocks_of_128(left, right, dtype)
    multiples = demands(kind, amd=amd)
    recipes, swizzles = [_RECIPES[kind]], [SwizzleType.NO_SWIZZLE if amd else SwizzleType.SWIZZLE_32_4_4]
    if kind == "nvfp4":  # the second level
        recipes, swizzles = [*recipes, ScalingType.TensorWise], [*swizzles, SwizzleType.NO_SWIZZLE]
    prepared = [_prepared(*pair, multiples.inner, amd) for pair in ((left, multiples.rows), (right, multiples.columns))]
    (a, scales_a), (b, scales_b) = prepared
    return F.scaled_mm(a, b.t(), scales_a, recipes, scales_b, recipes, swizzles, swizzles, output_dtype=dtype)


def _prepared(operand: BlockOperand, rows: int, inner: int, amd: bool) -> tuple[Tensor, list[Tensor]]:
    """Codes, padded and packed, and scales of both levels."""
    block = NATIVE[operand.kind].block
    assert block is not None
    values = pad(operand.values, -len(operand.values) % rows, -operand.values.shape[1] % inner)
    missing = values.shape[1] // block - operand.scales.shape[1]
    scales = pad(operand.scales, len(values) - len(operand.scales), missing)
    levels = [scales if amd else swizzle(scales)]
    if operand.kind == "nvfp4":
        one = torch.ones((), device=values.device)
        levels.append(one if operand.factor is None else operand.factor)
    return pack_codes(values) if values.dtype == torch.uint8 else values, levels


def _of_blocks_of_128(left: BlockOperand, right: BlockOperand, dtype: torch.dtype) -> Tensor:
    """1x128 · 1x128, 1x128 · 128x128 or 128x128 · 1x128. There is no GEMM of two operands in tiles: the scales of the
    left one are repeated."""
    if has_tiles(left) and has_tiles(right):
        left = left._replace(scales=repeated(left.scales, len(left.values), left.scales.shape[1], 128, 1))
    elif has_tiles(left):
        return _of_blocks_of_128(right, left, dtype).t()
    multiples = demands(left.kind, has_tiles(right))
    (a, scales_a), (b, scales_b) = (
        (pad(operand.values, -len(operand.values) % rows, -operand.values.shape[1] % multiples.inner), operand.scales)
        for operand, rows in ((left, multiples.rows), (right, multiples.columns))
    )
    recipe = ScalingType.BlockWise1x128
    other, blocks = recipe, scales_b.shape[1]
    if has_tiles(right):  # [blocks, tiles], a column of scales in multiples of 16 bytes
        other = ScalingType.BlockWise128x128
        scales_b = outer_major(F.pad(scales_b, (0, round_up(blocks, 4) - blocks)).t())
    else:
        scales_b = outer_major(F.pad(scales_b, (0, 0, 0, len(b) - len(scales_b))))
    scales_a = outer_major(F.pad(scales_a, (0, 0, 0, len(a) - len(scales_a))))
    return F.scaled_mm(a, b.t(), scales_a, recipe, scales_b, other, output_dtype=dtype)
