"""The kernels. Each makes an operand in one launch, on a grid of one dimension; strides count elements.

A program takes a tile of a matrix, or some blocks in a tile whose sides are powers of two
(:mod:`lightning_lowbit.kernels.gpu.tiles`).
"""

import triton
import triton.language as tl

from lightning_lowbit.kernels.gpu.codes import pack_blocks as pack_blocks
from lightning_lowbit.kernels.gpu.codes import unpack_blocks as unpack_blocks
from lightning_lowbit.kernels.gpu.device import float_of, magnitude_bits, stored, widen
from lightning_lowbit.kernels.gpu.layouts import lay_out_blocks as lay_out_blocks
from lightning_lowbit.kernels.gpu.layouts import lay_out_both as lay_out_both
from lightning_lowbit.kernels.gpu.passes import measure_shards as measure_shards
from lightning_lowbit.kernels.gpu.passes import pass_over_shards as pass_over_shards
from lightning_lowbit.kernels.gpu.passes import sum_partials as sum_partials
from lightning_lowbit.kernels.gpu.products import delay as delay
from lightning_lowbit.kernels.gpu.products import scale_and_round as scale_and_round
from lightning_lowbit.kernels.gpu.scales import (
    block_scales,
    encode_factor,
    levels_of,
    round_elements,
    scales_of,
    span_of,
    stored_scales,
    tensor_scales,
    zero_points,
)
from lightning_lowbit.kernels.gpu.tiles import (
    block_places,
    first_index,
    load_elements,
    load_rotated,
    product_of,
    random_at,
    tile_places,
)
from lightning_lowbit.kernels.gpu.tiles import draw_signs as draw_signs
from lightning_lowbit.kernels.gpu.tiles import pad_bytes as pad_bytes
from lightning_lowbit.kernels.gpu.tiles import rotate as rotate


@triton.jit
def cast_blocks(
    x,
    values,
    factor,
    amax,
    key,
    offset,
    rows,
    columns,
    row_stride,
    column_stride,
    CAST: tl.constexpr,
    DTYPE: tl.constexpr,
    THROUGH: tl.constexpr,
    SIDES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    signs=None,
    source_rows=None,
    source_columns=None,
    ROTATION: tl.constexpr = None,
    program=None,
):
    """Casts blocks of ``SIDES``, of which a program has ``BLOCKS``; with ``signs`` those of the rotated matrix."""
    if program is None:
        program = tl.program_id(0)
    down, right, row, column = block_places(program, columns, SIDES, PADDED, BLOCKS)
    is_row, is_column = row < rows, column < columns
    if SIDES[0] != PADDED[0]:
        is_row &= tl.arange(0, PADDED[0])[None, :, None, None] < SIDES[0]
    if SIDES[1] != PADDED[1]:
        is_column &= tl.arange(0, PADDED[1])[None, None, None, :] < SIDES[1]
    mask = is_row & is_column
    if signs is None:
        elements = load_elements(x, row, column, row_stride, column_stride, mask)
    else:
        source_mask = (row < source_rows) & (column < source_columns)
        elements = load_rotated(x, row, column, row_stride, column_stride, source_mask, signs, ROTATION, INTERPRETED)

    if CAST.by_row and SIDES[0] == 1:
        line = down * BLOCKS[0] + tl.arange(0, BLOCKS[0])[:, None, None, None]
        encode, decode = levels_of(tl.load(amax + line, mask=line < rows, other=0.0), CAST)
        tl.store(factor + line, decode, mask=line < tl.where(right == 0, rows, 0))
    elif CAST.by_row:
        line = right * BLOCKS[1] + tl.arange(0, BLOCKS[1])[None, None, :, None]
        encode, decode = levels_of(tl.load(amax + line, mask=line < columns, other=0.0), CAST)
        tl.store(factor + line, decode, mask=line < tl.where(down == 0, columns, 0))
    else:
        encode, decode = tensor_scales(amax, CAST)
        if program == 0:
            tl.store(factor, decode)
    width = tl.cdiv(columns, SIDES[1]) * SIDES[1]
    index = first_index(down, right, offset, width, SIDES, BLOCKS)
    scales, by, zeros = block_scales(elements, mask, encode, decode, index, key, CAST)
    random = random_at(row, column, key, offset, width, CAST)
    result = round_elements(elements, scales, by, zeros, random, CAST)
    result = stored(result, THROUGH, DTYPE, INTERPRETED)
    tl.store(values + (row.to(tl.int64) * columns + column), result, mask=mask)


@triton.jit
def cast_rows(
    x,
    values,
    factor,
    amax,
    key,
    offset,
    rows,
    columns,
    row_stride,
    column_stride,
    CAST: tl.constexpr,
    DTYPE: tl.constexpr,
    AXIS: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    program=None,
):
    """Casts rows (``AXIS`` 1) or columns (0): two loops along them, the second of which reads the cache."""
    if program is None:
        program = tl.program_id(0)
    LINES: tl.constexpr = TILE[1 - AXIS]
    STEP: tl.constexpr = TILE[AXIS]
    lines, length = (rows, columns) if AXIS == 1 else (columns, rows)
    line_stride, step_stride = (row_stride, column_stride) if AXIS == 1 else (column_stride, row_stride)
    line = tl.expand_dims(program * LINES + tl.arange(0, LINES), AXIS)
    is_line = line < lines
    steps = tl.expand_dims(tl.arange(0, STEP), 1 - AXIS)
    begin = x + line.to(tl.int64) * line_stride

    peaks = tl.zeros(TILE, tl.int32)
    total = tl.zeros(TILE, tl.float64)
    least = tl.zeros(TILE, tl.float32)
    most = tl.zeros(TILE, tl.float32)
    for start in range(0, length, STEP):
        step = start + steps
        at = begin + step.to(tl.int64) * step_stride
        elements = widen(tl.load(at, mask=is_line & (step < length), other=0.0))
        peaks = tl.maximum(peaks, magnitude_bits(elements))
        if CAST.statistic == "absmean":
            total += tl.abs(elements).to(tl.float64)
        if CAST.statistic == "minmax":
            least = tl.minimum(least, elements)
            most = tl.maximum(most, elements)

    encode, decode = tensor_scales(amax, CAST)
    peaks = tl.max(peaks, AXIS, keep_dims=True)
    zeros = 0.0
    if CAST.statistic == "absmean":
        mean = tl.sum(total, AXIS, keep_dims=True) / tl.cast(tl.maximum(length, 1), tl.float64)
        scales = scales_of(mean.to(tl.float32), encode, CAST)
    elif CAST.statistic == "minmax":
        least = tl.min(least, AXIS, keep_dims=True)
        least, span = span_of(least, tl.max(most, AXIS, keep_dims=True), peaks)
        scales = scales_of(span, encode, CAST)
        zeros = zero_points(least, scales, CAST)
    else:
        scales = scales_of(float_of(peaks), encode, CAST)
    tl.store(factor + line, stored_scales(scales, CAST) * decode, mask=is_line)

    by = encode_factor(scales, decode, CAST)
    for start in range(0, length, STEP):
        step = start + steps
        mask = is_line & (step < length)
        elements = widen(tl.load(begin + step.to(tl.int64) * step_stride, mask=mask, other=0.0))
        row, column = (line, step) if AXIS == 1 else (step, line)
        random = random_at(row, column, key, offset, columns, CAST)
        result = round_elements(elements, scales, by, zeros, random, CAST)
        result = stored(result, DTYPE, DTYPE, INTERPRETED)
        tl.store(values + (row.to(tl.int64) * columns + column), result, mask=mask)


@triton.jit
def cast_tensor(
    x,
    values,
    factor,
    amax,
    key,
    offset,
    rows,
    columns,
    row_stride,
    column_stride,
    sums,
    CAST: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    program=None,
):
    """Casts with one scale of the whole matrix, from its amax or from ``SUMS`` partial sums of its magnitudes."""
    if program is None:
        program = tl.program_id(0)
    row, column, mask = tile_places(program, rows, columns, TILE)
    elements = load_elements(x, row, column, row_stride, column_stride, mask)

    encode, decode = tensor_scales(amax, CAST)
    if CAST.statistic == "absmean":
        total = tl.sum(tl.load(sums + tl.arange(0, SUMS)), 0)
        count = tl.maximum(tl.cast(rows, tl.int64) * columns, 1)
        amount = (total / count.to(tl.float64)).to(tl.float32)
    else:
        amount = tl.load(amax)
    scales = scales_of(amount, encode, CAST)
    if program == 0:
        tl.store(factor, stored_scales(scales, CAST) * decode)
    by = encode_factor(scales, decode, CAST)
    random = random_at(row, column, key, offset, columns, CAST)
    result = round_elements(elements, scales, by, 0.0, random, CAST)
    result = stored(result, DTYPE, DTYPE, INTERPRETED)
    tl.store(values + (row.to(tl.int64) * columns + column), result, mask=mask)


@triton.jit
def cast_stack(
    x,
    values,
    factor,
    amax,
    key,
    ends,
    rows,
    columns,
    row_stride,
    column_stride,
    product_stride,
    signs,
    KERNEL: tl.constexpr,
    PROGRAM: tl.constexpr,
    PRODUCTS: tl.constexpr,
    CAST: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    THROUGH: tl.constexpr = None,
    SIDES: tl.constexpr = None,
    PADDED: tl.constexpr = None,
    BLOCKS: tl.constexpr = None,
    AXIS: tl.constexpr = None,
    TILE: tl.constexpr = None,
    SUMS: tl.constexpr = None,
    ROTATION: tl.constexpr = None,
    SIGNS: tl.constexpr = 0,
):
    """Casts the matrices of a stack, each as ``KERNEL`` does; a program has ``PROGRAM`` rows and columns.

    Args:
        x: matrices of ``rows``, ``product_stride`` apart; with ``ends`` the rows of all of them in one.
        factor: one number for each product, row, or column of a product.
        amax, key: one for each product.
        ends: int32 ``[PRODUCTS]``, a power of two, of which the last ones may have no rows; None for matrices.
        signs: of the rotation, ``SIGNS`` for each product; 0 for those that all share.
    """
    GROUP: tl.constexpr = ROTATION[1] if ROTATION is not None and ROTATION[0] == 0 else 1
    WIDTH: tl.constexpr = ROTATION[1] if ROTATION is not None and ROTATION[0] == 1 else 1
    width = tl.cdiv(columns, WIDTH) * WIDTH
    across = tl.maximum(tl.cdiv(width, PROGRAM[1]), 1)
    number, start, line, source_rows, height, program = product_of(ends, rows, across, PROGRAM[0], GROUP, PRODUCTS)
    x += number.to(tl.int64) * product_stride if ends is None else start.to(tl.int64) * row_stride
    values += line.to(tl.int64) * width
    amax = amax if amax is None else amax + number
    key = key if key is None else key + number
    signs = signs if signs is None else signs + number * SIGNS
    if KERNEL == "cast_blocks":
        cast_blocks(
            x,
            values,
            factor + number,
            amax,
            key,
            None,
            height,
            width,
            row_stride,
            column_stride,
            CAST,
            DTYPE,
            THROUGH,
            SIDES,
            PADDED,
            BLOCKS,
            INTERPRETED,
            signs,
            source_rows,
            columns,
            ROTATION,
            program,
        )
    elif KERNEL == "cast_rows":
        factor += line if AXIS == 1 else number * columns
        cast_rows(
            x,
            values,
            factor,
            amax,
            key,
            None,
            height,
            width,
            row_stride,
            column_stride,
            CAST,
            DTYPE,
            AXIS,
            TILE,
            INTERPRETED,
            program,
        )
    else:
        cast_tensor(
            x,
            values,
            factor + number,
            amax,
            key,
            None,
            height,
            width,
            row_stride,
            column_stride,
            None,
            CAST,
            DTYPE,
            TILE,
            SUMS,
            INTERPRETED,
            program,
        )


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
    INTERPRETED: tl.constexpr = False,
):
    """Raises the bits of an amax for each product of a stack, with the arguments of :func:`cast_stack`."""
    GROUP: tl.constexpr = ROTATION[1] if ROTATION is not None and ROTATION[0] == 0 else 1
    WIDTH: tl.constexpr = ROTATION[1] if ROTATION is not None and ROTATION[0] == 1 else 1
    width = tl.cdiv(columns, WIDTH) * WIDTH
    across = tl.maximum(tl.cdiv(width, TILE[1]), 1)
    number, start, _, source_rows, height, program = product_of(ends, rows, across, TILE[0], GROUP, PRODUCTS)
    x += number.to(tl.int64) * product_stride if ends is None else start.to(tl.int64) * row_stride
    row, column, _ = tile_places(program, height, width, TILE)
    mask = (row < source_rows) & (column < columns)
    if signs is None:
        elements = load_elements(x, row, column, row_stride, column_stride, mask)
    else:
        signs += number * SIGNS
        elements = load_rotated(x, row, column, row_stride, column_stride, mask, signs, ROTATION, INTERPRETED)
    tl.atomic_max(amax + number, tl.max(magnitude_bits(elements)))


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
    INTERPRETED: tl.constexpr = False,
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
            elements = load_rotated(x, row, column, row_stride, column_stride, mask, signs, ROTATION, INTERPRETED)
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
    INTERPRETED: tl.constexpr,
):
    """Casts in blocks of 1 x ``SIDES[0]`` and of ``SIDES[1]`` x 1, from one read."""
    row, column, mask = tile_places(tl.program_id(0), rows, columns, TILE)
    elements = load_elements(x, row, column, row_stride, column_stride, mask)
    target = row.to(tl.int64) * columns + column

    along: tl.constexpr = (TILE[0], 1, TILE[1] // SIDES[0], SIDES[0])
    stride = tl.cdiv(columns, SIDES[0]) * SIDES[0]
    result = _cast_tile(elements, mask, row, column, stride, factor_row, amax_row, key_row, CAST_ROW, along)
    result = stored(result, THROUGH_ROW, DTYPE_ROW, INTERPRETED)
    tl.store(values_row + target, result, mask=mask)

    down: tl.constexpr = (TILE[0] // SIDES[1], SIDES[1], TILE[1], 1)
    result = _cast_tile(elements, mask, row, column, columns, factor_column, amax_column, key_column, CAST_COLUMN, down)
    result = stored(result, THROUGH_COLUMN, DTYPE_COLUMN, INTERPRETED)
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
