"""Kernels around the casts: amaxes and means before them, pairs of casts, factors and bias of a GEMM's result after."""

import triton
import triton.language as tl

from lightning_lowbit.kernels.gpu.device import magnitude_bits, narrow, stored, widen
from lightning_lowbit.kernels.gpu.scales import block_scales, round_elements, tensor_scales
from lightning_lowbit.kernels.gpu.tiles import load_elements, load_rotated, product_of, random_at, tile_places


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
    product_rows=None,
):
    """Writes ``x * first * second + bias``. ``SPREAD`` says along which axes each of the last three has sizes; of
    products below each other, of ``product_rows``, columns may have their own."""
    OF_FIRST: tl.constexpr = SPREAD[0]
    OF_SECOND: tl.constexpr = SPREAD[1]
    OF_BIAS: tl.constexpr = SPREAD[2]
    row, column, mask = tile_places(tl.program_id(0), rows, columns, TILE)
    values = load_elements(x, row, column, row_stride, column_stride, mask)
    if first is not None:
        values = values * _spread(first, row, column, rows, columns, product_rows, OF_FIRST)
    if second is not None:
        values = values * _spread(second, row, column, rows, columns, product_rows, OF_SECOND)
    if bias is not None:
        values = values + _spread(bias, row, column, rows, columns, product_rows, OF_BIAS)
    tl.store(result + (row.to(tl.int64) * columns + column), narrow(values, DTYPE), mask=mask)


@triton.jit
def _spread(tensor, row, column, rows, columns, product_rows, AXES: tl.constexpr):
    """Contiguous values that broadcast over a tile of a matrix."""
    if AXES == "":
        return widen(tl.load(tensor))
    elif AXES == "rows":
        return widen(tl.load(tensor + row, mask=row < rows, other=0.0))
    elif AXES == "columns":
        return widen(tl.load(tensor + column, mask=column < columns, other=0.0))
    else:
        line = row // product_rows if AXES == "columns of products" else row
        at = line.to(tl.int64) * columns + column
        return widen(tl.load(tensor + at, mask=(row < rows) & (column < columns), other=0.0))


@triton.jit
def measure_stack(
    x,
    amax,
    ends,
    rows,
    columns,
    row_stride,
    column_stride,
    product_stride,
    signs,
    TILE: tl.constexpr,
    PRODUCTS: tl.constexpr,
    ROTATION: tl.constexpr = None,
    SIGNS: tl.constexpr = 0,
):
    """Raises the bits of an amax for each product of a stack, with the arguments of :func:`cast_stack`."""
    number, start, _, source_rows, height, width, program = product_of(ends, rows, columns, TILE, ROTATION, PRODUCTS)
    x += number.to(tl.int64) * product_stride if ends is None else start.to(tl.int64) * row_stride
    row, column, _ = tile_places(program, height, width, TILE)
    mask = (row < source_rows) & (column < columns)
    if signs is None:
        elements = load_elements(x, row, column, row_stride, column_stride, mask)
    else:
        signs += number * SIGNS
        elements = load_rotated(x, row, column, row_stride, column_stride, mask, signs, ROTATION)
    tl.atomic_max(amax + number, tl.max(magnitude_bits(elements)))


@triton.jit
def measure_peaks(
    x,
    amax,
    rows,
    columns,
    row_stride,
    column_stride,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):
    """Raises the bits of the amax of a matrix, or of each column; a program has ``STEPS`` tiles below each other."""
    across = tl.cdiv(columns, TILE[1])
    down, right = tl.program_id(0) // across * STEPS, tl.program_id(0) % across
    column = right * TILE[1] + tl.arange(0, TILE[1])[None, :]
    peaks = tl.zeros(TILE, tl.int32)
    for step in range(STEPS):
        row = (down + step) * TILE[0] + tl.arange(0, TILE[0])[:, None]
        elements = load_elements(x, row, column, row_stride, column_stride, (row < rows) & (column < columns))
        peaks = tl.maximum(peaks, magnitude_bits(elements))
    if BY_COLUMN:
        tl.atomic_max(amax + column, tl.max(peaks, 0, keep_dims=True), mask=column < columns)
    else:
        tl.atomic_max(amax, tl.max(peaks))


@triton.jit
def measure(
    x,
    amax,
    sums,
    rows,
    columns,
    row_stride,
    column_stride,
    TILE: tl.constexpr,
    signs=None,
    source_rows=None,
    source_columns=None,
    ROTATION: tl.constexpr = None,
):
    """Writes the amax of the rotated matrix (its bits, by an atomic maximum); or without ``signs`` the partial sums of
    magnitudes, one per program."""
    across = tl.maximum(tl.cdiv(columns, TILE[1]), 1)
    peaks = tl.zeros(TILE, tl.int32)
    total = tl.zeros(TILE, tl.float64)
    for tile in range(tl.program_id(0), tl.cdiv(rows, TILE[0]) * across, tl.num_programs(0)):
        row, column, mask = tile_places(tile, rows, columns, TILE)
        if signs is None:
            total += tl.abs(load_elements(x, row, column, row_stride, column_stride, mask)).to(tl.float64)
        else:
            mask = (row < source_rows) & (column < source_columns)
            elements = load_rotated(x, row, column, row_stride, column_stride, mask, signs, ROTATION)
            peaks = tl.maximum(peaks, magnitude_bits(elements))
    if signs is None:
        tl.store(sums + tl.program_id(0), tl.sum(total))
    else:
        tl.atomic_max(amax, tl.max(peaks))


@triton.jit
def cast_both(
    x,
    values_row,
    values_column,
    factor_row,
    factor_column,
    amax_row,
    amax_column,
    key_row,
    key_column,
    rows,
    columns,
    row_stride,
    column_stride,
    CAST_ROW: tl.constexpr,
    CAST_COLUMN: tl.constexpr,
    DTYPE_ROW: tl.constexpr,
    DTYPE_COLUMN: tl.constexpr,
    THROUGH_ROW: tl.constexpr,
    THROUGH_COLUMN: tl.constexpr,
    SIDES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Casts in blocks of 1 x ``SIDES[0]`` and of ``SIDES[1]`` x 1, from one read."""
    row, column, mask = tile_places(tl.program_id(0), rows, columns, TILE)
    elements = load_elements(x, row, column, row_stride, column_stride, mask)
    target = row.to(tl.int64) * columns + column

    along: tl.constexpr = (TILE[0], 1, TILE[1] // SIDES[0], SIDES[0])
    stride = tl.cdiv(columns, SIDES[0]) * SIDES[0]
    result = _cast_tile(elements, mask, row, column, stride, factor_row, amax_row, key_row, CAST_ROW, along)
    result = stored(result, THROUGH_ROW, DTYPE_ROW)
    tl.store(values_row + target, result, mask=mask)

    down: tl.constexpr = (TILE[0] // SIDES[1], SIDES[1], TILE[1], 1)
    result = _cast_tile(elements, mask, row, column, columns, factor_column, amax_column, key_column, CAST_COLUMN, down)
    result = stored(result, THROUGH_COLUMN, DTYPE_COLUMN)
    tl.store(values_column + target, result, mask=mask)


@triton.jit
def _cast_tile(elements, mask, row, column, stride, factor, amax, key, CAST: tl.constexpr, SHAPE: tl.constexpr):
    """Casts a tile ``[rows, columns]`` in blocks along axes 1 and 3 of ``SHAPE``."""
    encode, decode = tensor_scales(amax, CAST)
    if tl.program_id(0) == 0:
        tl.store(factor, decode)
    blocks = tl.reshape(elements, SHAPE)
    scales, by, zeros = block_scales(blocks, tl.reshape(mask, SHAPE), encode, decode, 0, key, CAST)
    random = random_at(row, column, key, None, stride, CAST)
    if CAST.stochastic:
        random = tl.reshape(random, SHAPE)
    result = round_elements(blocks, scales, by, zeros, random, CAST)
    return tl.reshape(result, elements.shape)
