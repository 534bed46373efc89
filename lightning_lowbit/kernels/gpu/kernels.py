# ruff: noqa: F401  all kernels have their names here, where launches look for them
"""The kernels. Each makes an operand in one launch, on a grid of one dimension; strides count elements.

A program takes a tile of a matrix, or some blocks in a tile whose sides are powers of two
(:mod:`lightning_lowbit.kernels.gpu.tiles`).
"""

import triton
import triton.language as tl

from lightning_lowbit.kernels.gpu.codes import pack_blocks, unpack_blocks
from lightning_lowbit.kernels.gpu.device import float_of, magnitude_bits, stored, widen
from lightning_lowbit.kernels.gpu.layouts import lay_out_blocks, lay_out_both
from lightning_lowbit.kernels.gpu.passes import measure_shards, pass_over_shards, sum_partials
from lightning_lowbit.kernels.gpu.products import (
    cast_both,
    delay,
    measure,
    measure_peaks,
    measure_stack,
    scale_and_round,
)
from lightning_lowbit.kernels.gpu.scales import (
    block_scales,
    elements_in,
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
    draw_signs,
    first_index,
    load_elements,
    load_rotated,
    pad_bytes,
    place_in,
    product_of,
    random_at,
    rotate,
    tile_places,
)


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
    signs=None,
    source_rows=None,
    source_columns=None,
    ROTATION: tl.constexpr = None,
    program=None,
):
    """Casts blocks of ``SIDES``, of which a program has ``BLOCKS``; with ``signs`` those of the rotated matrix."""
    program = tl.program_id(0) if program is None else program
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
        elements = load_rotated(x, row, column, row_stride, column_stride, source_mask, signs, ROTATION)

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
    result = stored(result, THROUGH, DTYPE)
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
    ORDER: tl.constexpr = 1,
    program=None,
):
    """Casts rows (``AXIS`` 1) or columns (0): two loops along them, the second of which reads the cache."""
    program = tl.program_id(0) if program is None else program
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
        result = elements_in(elements, scales, by, zeros, random, CAST, DTYPE)
        tl.store(values + place_in(row, column, rows, columns, ORDER), result, mask=mask)


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
    AXIS: tl.constexpr = None,
    ORDER: tl.constexpr = 1,
    program=None,
):
    """Casts with one scale of the whole matrix, from its amax or from ``SUMS`` partial sums of its magnitudes; or with
    one of each row (``AXIS`` 1) or column (0), from ``amax`` of all of them, or without it from tiles of whole ones."""
    program = tl.program_id(0) if program is None else program
    row, column, mask = tile_places(program, rows, columns, TILE)
    elements = load_elements(x, row, column, row_stride, column_stride, mask)

    encode, decode = tensor_scales(amax, CAST)
    if CAST.statistic == "absmean":
        total = tl.sum(tl.load(sums + tl.arange(0, SUMS)), 0)
        count = tl.maximum(tl.cast(rows, tl.int64) * columns, 1)
        amount = (total / count.to(tl.float64)).to(tl.float32)
    elif AXIS is None:
        amount = tl.load(amax)
    elif amax is None:
        amount = float_of(tl.max(magnitude_bits(elements), AXIS, keep_dims=True))
    elif AXIS == 1:
        amount = tl.load(amax + row, mask=row < rows, other=0.0)
    else:
        amount = tl.load(amax + column, mask=column < columns, other=0.0)
    scales = scales_of(amount, encode, CAST)
    across = tl.cdiv(columns, TILE[1])
    if AXIS == 1:
        is_first = row < tl.where(program % across == 0, rows, 0)
        tl.store(factor + row, stored_scales(scales, CAST) * decode, mask=is_first)
    elif AXIS == 0:
        is_first = column < tl.where(program < across, columns, 0)
        tl.store(factor + column, stored_scales(scales, CAST) * decode, mask=is_first)
    elif program == 0:
        tl.store(factor, stored_scales(scales, CAST) * decode)
    by = encode_factor(scales, decode, CAST)
    random = random_at(row, column, key, offset, columns, CAST)
    result = elements_in(elements, scales, by, 0.0, random, CAST, DTYPE)
    tl.store(values + place_in(row, column, rows, columns, ORDER), result, mask=mask)


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
    number, start, line, length, height, width, program = product_of(ends, rows, columns, PROGRAM, ROTATION, PRODUCTS)
    x += number.to(tl.int64) * product_stride if ends is None else start.to(tl.int64) * row_stride
    values += line.to(tl.int64) * width
    if amax is not None:
        amax += number
    if key is not None:
        key += number
    if signs is not None:
        signs += number * SIGNS
    if KERNEL == "cast_rows":
        factor += line if AXIS == 1 else number * columns
    else:
        factor += number
    matrix = (x, values, factor, amax, key, None, height, width, row_stride, column_stride)
    if KERNEL == "cast_blocks":
        source = (signs, length, columns)
        cast_blocks(*matrix, CAST, DTYPE, THROUGH, SIDES, PADDED, BLOCKS, *source, ROTATION, program)
    elif KERNEL == "cast_rows":
        cast_rows(*matrix, CAST, DTYPE, AXIS, TILE, 1, program)
    else:
        cast_tensor(*matrix, None, CAST, DTYPE, TILE, SUMS, None, 1, program)
