"""Native GEMMs of GPUs: torch's calls, and what their operands must be.

Block-scaled ones are calls of ``torch.nn.functional.scaled_mm``. All are "TN": both operands have the contraction axis
in their rows of memory, so those of dgrad and wgrad that lie across it are transposed physically
(:mod:`lightning_lowbit.nn.native.operand`). Sizes are padded with zeros.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from lightning_lowbit._torch import int_mm, scaled_mm
from lightning_lowbit.compilation import counted_as
from lightning_lowbit.kernels.layout import outer_major, repeated, round_up
from lightning_lowbit.kernels.products import pad, scale_and_round
from lightning_lowbit.nn.native.operand import BlockOperand, has_tiles
from lightning_lowbit.nn.native.table import NATIVE

_RECIPES = {"nvfp4": ScalingType.BlockWise1x16, "mxfp4": ScalingType.BlockWise1x32, "mxfp8": ScalingType.BlockWise1x32}


def results(kind: str) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of a GEMM's results on this machine's kind of GPU; AMD's gives no float32."""
    return tuple(dtype for dtype in NATIVE[kind].results if torch.version.hip is None or dtype != torch.float32)


def block_product(left: BlockOperand, right: BlockOperand, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Returns the product ``[rows, columns]`` of ``[rows, k]`` and ``[columns, k]``, and the factors that it lacks. It
    has ``dtype`` if it lacks none, and else is float32 where the GEMM gives float32."""
    kind, (rows, inner), columns = left.kind, left.size, right.size[0]
    inside = kind == "nvfp4"  # its GEMM multiplies the product of two factors in
    factors = [] if inside else [factor for factor in (left.factor, right.factor) if factor is not None]
    if factors and torch.float32 in results(kind):
        dtype = torch.float32
    if 0 in (rows, inner, columns):
        return left.scales.new_zeros((rows, columns), dtype=dtype), factors
    with counted_as(rows, inner, columns):
        multiply = _multiply_blocks_of_128 if kind == "fp8-blockwise" else _scaled_mm
        product = multiply(left, right, dtype)[:rows, :columns]
    return product.contiguous(), factors


def _scaled_mm(left: BlockOperand, right: BlockOperand, dtype: torch.dtype) -> Tensor:
    kind, amd = left.kind, torch.version.hip is not None
    recipes, swizzles = [_RECIPES[kind]], [SwizzleType.NO_SWIZZLE if amd else SwizzleType.SWIZZLE_32_4_4]
    if kind == "nvfp4":  # the second level
        recipes, swizzles = [*recipes, ScalingType.TensorWise], [*swizzles, SwizzleType.NO_SWIZZLE]
    (a, scales_a), (b, scales_b) = gemm_arguments(left), gemm_arguments(right)
    return F.scaled_mm(a, b.t(), scales_a, recipes, scales_b, recipes, swizzles, swizzles, output_dtype=dtype)


def gemm_arguments(operand: BlockOperand) -> tuple[Tensor, list[Tensor]]:
    """Returns elements, and scales of both levels, in the dtypes and shapes of ``scaled_mm``."""
    values, levels = operand.values, [operand.scales]
    if torch.version.hip is not None:
        levels = [operand.scales.view(len(values), -1)]
    if operand.kind == "nvfp4":
        levels.append(torch.ones((), device=values.device) if operand.factor is None else operand.factor)
    return values.view(torch.float4_e2m1fn_x2) if values.dtype == torch.uint8 else values, levels


def _multiply_blocks_of_128(left: BlockOperand, right: BlockOperand, dtype: torch.dtype) -> Tensor:
    """Multiplies 1x128 · 1x128, 1x128 · 128x128 or 128x128 · 1x128. There is no GEMM of two operands in tiles: the
    scales of the left one are repeated."""
    if has_tiles(left) and has_tiles(right):
        left = left._replace(scales=repeated(left.scales, left.size[0], left.scales.shape[1], 128, 1))
    elif has_tiles(left):
        return _multiply_blocks_of_128(right, left, dtype).t()
    (a, scales_a), (b, scales_b) = (
        (pad(operand.values, -operand.size[0] % rows, -operand.size[1] % 128), operand.scales)
        for operand, rows in ((left, 16), (right, 128 if has_tiles(right) else 16))
    )
    recipe = ScalingType.BlockWise1x128
    other, blocks = recipe, scales_b.shape[1]
    if has_tiles(right):  # [blocks, tiles], a column of scales in multiples of 16 bytes
        other = ScalingType.BlockWise128x128
        scales_b = _padded(scales_b, 0, round_up(blocks, 4) - blocks).t()
    else:
        scales_b = _padded(scales_b, len(b) - len(scales_b), 0)
    scales_a = _padded(scales_a, len(a) - len(scales_a), 0)
    scales_a, scales_b = outer_major(scales_a), outer_major(scales_b)
    return F.scaled_mm(a, b.t(), scales_a, recipe, scales_b, other, output_dtype=dtype)


def _padded(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Returns scales with zeros below and to the right, not copied if there are none."""
    return F.pad(scales, (0, columns, 0, rows)) if rows or columns else scales


def fp8_product(
    matrices: tuple[Tensor, Tensor],
    factors: tuple[Tensor | None, Tensor | None],
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Multiplies FP8 values ``[m, k]`` and ``[k, n]``, padded to multiples of 16 for the inner size and columns. The
    result is rounded once, after bias and scales: in the GEMM for bfloat16, behind it for all else. ``fast`` keeps sums
    in the tensor cores."""
    left, right = matrices
    scales = [factor for factor in factors if factor is not None]
    rows, inner, columns = len(left), len(right), right.shape[1]
    if 0 in (rows, inner, columns):  # which GPUs refuse, or leave unwritten
        return finish(left.new_zeros((rows, columns), dtype=torch.float32), scales, bias, dtype)
    # It reads rows of the left operand and columns of the right one, each contiguous.
    left, right = pad(left, 0, -inner % 16), pad(right.t(), -columns % 16, -inner % 16).t()
    inside = dtype == torch.bfloat16 and (bias is None or (bias.dtype == dtype and bias.dim() == 1))
    row_scales, column_scales = (
        factor if inside and factor is not None else torch.ones((), device=left.device) for factor in factors
    )
    if row_scales.dim() or column_scales.dim():  # then the GEMM takes one per row and column
        row_scales = row_scales.expand(rows, 1).reshape(rows).contiguous().unsqueeze(1)
        column_scales = _pad_vector(column_scales.expand(1, columns).reshape(columns))[None]
    with counted_as(rows, inner, columns):
        product = scaled_mm(
            left,
            right,
            scale_a=row_scales,
            scale_b=column_scales,
            bias=_pad_vector(bias) if inside and bias is not None else None,
            out_dtype=dtype if inside else torch.float32,
            use_fast_accum=fast,
        )[:, :columns]
    return product.contiguous() if inside else finish(product, scales, bias, dtype)


def _pad_vector(vector: Tensor) -> Tensor:
    """Returns a vector as GEMMs read it: contiguous, at a multiple of 16 bytes, with zeros up to one of 16 elements."""
    if len(vector) % 16 or not vector.is_contiguous() or vector.data_ptr() % 16:
        return F.pad(vector, (0, -len(vector) % 16))
    return vector


def int8_product(
    matrices: tuple[Tensor, Tensor], scales: Sequence[Tensor | None], bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiplies int8 values ``[m, k]`` and ``[k, n]`` to int32; padded for GPUs: more than 16 rows, multiples of 8."""
    left, right = matrices
    rows, inner, columns = len(left), len(right), right.shape[1]
    factors = [scale for scale in scales if scale is not None]
    if 0 in (rows, inner, columns):
        return finish(left.new_zeros((rows, columns), dtype=torch.int32), factors, bias, dtype)
    if left.device.type == "cuda":
        left, right = pad(left, max(17 - rows, 0), -inner % 8), pad(right.t(), -columns % 8, -inner % 8).t()
    elif 1 in (rows, inner):  # CPUs read the strides of single rows, too, and may leave the result unwritten
        left, right = pad(left, 0, 0), pad(right, 0, 0)
    with counted_as(rows, inner, columns):
        product = int_mm(left, right)[:rows, :columns]
    return finish(product, factors, bias, dtype)


def finish(product: Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiplies factors into a product, adds the bias, and rounds once to ``dtype``."""
    if not factors and bias is None:
        return product.to(dtype).contiguous()
    return scale_and_round(product, factors, bias, dtype)
