"""Kernels around the casts: amaxes of delayed scaling before them, factors and bias of a GEMM's result after them."""

import triton
import triton.language as tl

from lightning_lowbit.kernels.gpu.device import stored, widen
from lightning_lowbit.kernels.gpu.tiles import load_elements, tile_places


@triton.jit
def delay(x, in_force, staged, result, PLACES: tl.constexpr):
    """Raises the step's amaxes where bits of ``PLACES`` are set, unless ``x`` is not finite. Writes the amax in force,
    or ``x`` while that is 0."""
    amax, force = tl.load(x), tl.load(in_force)
    if staged is not None:
        place = tl.arange(0, 8)  # of six operands
        mask = (((place * 0 + PLACES) >> place) & 1) == 1
        before = tl.load(staged + place, mask=mask, other=0.0)
        tl.store(staged + place, tl.where(amax < float("inf"), tl.maximum(amax, before), before), mask=mask)
    tl.store(result, tl.where(force > 0, force, amax))


@triton.jit
def scale_and_round(
    x,
    first,
    second,
    bias,
    result,
    rows,
    columns,
    row_stride,
    column_stride,
    SPREAD: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Writes ``x * first * second + bias``. ``SPREAD`` says along which axes each of the last three has sizes."""
    OF_FIRST: tl.constexpr = SPREAD[0]
    OF_SECOND: tl.constexpr = SPREAD[1]
    OF_BIAS: tl.constexpr = SPREAD[2]
    row, column, mask = tile_places(tl.program_id(0), rows, columns, TILE)
    values = load_elements(x, row, column, row_stride, column_stride, mask)
    if first is not None:
        values = values * _spread(first, row, column, rows, columns, OF_FIRST)
    if second is not None:
        values = values * _spread(second, row, column, rows, columns, OF_SECOND)
    if bias is not None:
        values = values + _spread(bias, row, column, rows, columns, OF_BIAS)
    tl.store(result + (row.to(tl.int64) * columns + column), stored(values, DTYPE, DTYPE, INTERPRETED), mask=mask)


@triton.jit
def _spread(tensor, row, column, rows, columns, AXES: tl.constexpr):
    """Contiguous values that broadcast over a tile of a matrix."""
    if AXES == "":
        return widen(tl.load(tensor))
    elif AXES == "rows":
        return widen(tl.load(tensor + row, mask=row < rows, other=0.0))
    elif AXES == "columns":
        return widen(tl.load(tensor + column, mask=column < columns, other=0.0))
    else:
        at = row.to(tl.int64) * columns + column
        return widen(tl.load(tensor + at, mask=(row < rows) & (column < columns), other=0.0))
