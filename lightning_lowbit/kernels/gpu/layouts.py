"""The kernel for operands of native GEMMs: codes and scales as :mod:`lightning_lowbit.kernels.layout` lays them out.

A thread has whole blocks, so that it computes their scales once and reduces nothing with others.
"""

import triton
import triton.language as tl

from lightning_lowbit.kernels.gpu.codes import code_of, code_of_scale, joined_codes
from lightning_lowbit.kernels.gpu.device import e2m1_codes, fp8_codes
from lightning_lowbit.kernels.gpu.scales import block_scales, round_elements, stored_scales, tensor_scales
from lightning_lowbit.kernels.gpu.tiles import load_elements, places_of, random_at


@triton.jit
def lay_out_blocks(
    x,
    codes,
    scales_at,
    factor,
    amax,
    key,
    offset,
    rows,
    columns,
    row_stride,
    column_stride,
    CAST: tl.constexpr,
    SIDES: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    SCALED: tl.constexpr,
    PADDED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """Writes codes and scales, with the contraction axis in the columns.

    Sizes, strides and ``SIDES`` are those of the matrix, or with ``DIM`` 0 of its transpose. A scale is of ``SCALED``
    elements; codes are zero up to multiples of ``PADDED``. Programs cover whole tiles of scales. ``CONTIGUOUS`` is the
    axis along which memory is.
    """
    across = tl.cdiv(tl.cdiv(columns, 4 * SCALED) * (4 * SCALED), SIDES[1] * BLOCKS[1])
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    at = (rows, columns, row_stride, column_stride, down, right)
    _lay_out(x, codes, scales_at, factor, amax, key, offset, at, CAST, SIDES, BLOCKS, DIM, SCALED, PADDED, CONTIGUOUS)


@triton.jit
def lay_out_both(
    x,
    codes_row,
    codes_column,
    scales_row,
    scales_column,
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
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    PADDED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """Does :func:`lay_out_blocks` for blocks of ``SIZE`` along rows and along columns. A program has a square
    ``TILE``, which it reads twice: the second time from a cache."""
    across = tl.cdiv(columns, 128) * 128 // TILE[1]
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    blocks: tl.constexpr = (TILE[0], TILE[1] // SIZE)
    sides: tl.constexpr = (1, SIZE)
    row = (codes_row, scales_row, factor_row, amax_row, key_row, None)
    at = (rows, columns, row_stride, column_stride, down, right)
    _lay_out(x, *row, at, CAST_ROW, sides, blocks, 1, SCALED, PADDED, CONTIGUOUS)
    column = (codes_column, scales_column, factor_column, amax_column, key_column, None)
    at = (columns, rows, column_stride, row_stride, right, down)
    _lay_out(x, *column, at, CAST_COLUMN, sides, blocks, 0, SCALED, PADDED, 1 - CONTIGUOUS)


@triton.jit
def _lay_out(
    x,
    codes,
    scales_at,
    factor,
    amax,
    key,
    offset,
    at,
    CAST: tl.constexpr,
    SIDES: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    SCALED: tl.constexpr,
    PADDED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """Writes codes and scales of a program's blocks; for arguments see :func:`lay_out_blocks`."""
    ELEMENTS: tl.constexpr = CAST.elements
    rows, columns, row_stride, column_stride, down, right = at
    across = tl.cdiv(columns, 4 * SCALED)
    row, column = places_of(down, right, SIDES, SIDES, BLOCKS)
    mask = (row < rows) & (column < columns)
    if SIDES[0] == 1 and SIDES[1] <= 32:
        elements = _load_blocks(x, at, SIDES, BLOCKS, CONTIGUOUS)
    else:
        elements = load_elements(x, row, column, row_stride, column_stride, mask)

    encode, decode = tensor_scales(amax, CAST)
    if tl.program_id(0) == 0:
        tl.store(factor, decode)
    scales, by, zeros = block_scales(elements, mask, encode, decode, 0, key, CAST)
    if DIM == 1:
        width = tl.cdiv(columns, SIDES[1]) * SIDES[1]
        random = random_at(row, column, key, offset, width, CAST)
    else:
        width = tl.cdiv(rows, SIDES[0]) * SIDES[0]
        random = random_at(column, row, key, offset, width, CAST)
    shape: tl.constexpr = (BLOCKS[0], SIDES[0], BLOCKS[1], SIDES[1])
    if CAST.capability >= 100 and ELEMENTS.max == 6.0:
        joined = e2m1_codes(elements, by, random, CAST, shape)
    elif CAST.capability >= 89 and ELEMENTS.bits == 8 and not CAST.stochastic:
        joined = fp8_codes(tl.reshape(elements * by, (shape[0] * shape[1], shape[2] * shape[3])), False)
    else:
        rounded = round_elements(elements, 1.0, by, zeros, random, CAST)
        joined = joined_codes(code_of(rounded, ELEMENTS), ELEMENTS, shape).to(tl.uint8)
    count: tl.constexpr = 8 // ELEMENTS.bits
    wide: tl.constexpr = SIDES[1] * BLOCKS[1] // count
    all_bytes = tl.cdiv(columns, PADDED[1]) * PADDED[1] // count
    byte_row = down * (BLOCKS[0] * SIDES[0]) + tl.arange(0, BLOCKS[0] * SIDES[0])[:, None]
    byte = right * wide + tl.arange(0, wide)[None, :]
    is_byte = (byte_row < tl.cdiv(rows, PADDED[0]) * PADDED[0]) & (byte < all_bytes)
    tl.store(codes + (byte_row.to(tl.int64) * all_bytes + byte), joined, mask=is_byte)

    if CAST.scale == "fp32":  # tiles as they are, scales of rows one block after the other
        down_block = down * BLOCKS[0] + tl.arange(0, BLOCKS[0])[:, None, None, None]
        right_block = right * BLOCKS[1] + tl.arange(0, BLOCKS[1])[None, None, :, None]
        if SIDES[0] == 1:
            place = right_block.to(tl.int64) * rows + down_block
        else:
            place = down_block.to(tl.int64) * tl.cdiv(columns, SIDES[1]) + right_block
        is_block = (down_block * SIDES[0] < rows) & (right_block * SIDES[1] < columns)
        tl.store(scales_at + place, stored_scales(scales, CAST), mask=is_block)
    else:
        _store_swizzled(scales_at, scales, at, across, CAST, SIDES, BLOCKS, SCALED)


@triton.jit
def _store_swizzled(
    scales_at, scales, at, across, CAST: tl.constexpr, SIDES: tl.constexpr, BLOCKS: tl.constexpr, SCALED: tl.constexpr
):
    """Writes codes of scales in the order of tensor cores."""
    rows, columns, _, _, down, right = at
    code = code_of_scale(stored_scales(scales, CAST), CAST)
    per_block: tl.constexpr = SIDES[1] // SCALED
    first = (right * BLOCKS[1] + tl.arange(0, BLOCKS[1])[None, None, :, None]) * per_block
    line = down * (BLOCKS[0] * SIDES[0]) + tl.arange(0, BLOCKS[0])[:, None, None, None] * SIDES[0]
    line += tl.arange(0, SIDES[0])[None, :, None, None]
    block = first + tl.arange(0, per_block)[None, None, None, :]
    code = tl.where((line < rows) & (block * SCALED < columns), code, 0)
    tile = (line // 128).to(tl.int64) * across + block // 4
    place = tile * 512 + (line % 32 * 16 + line % 128 // 32 * 4 + block % 4)
    is_place = (line < tl.cdiv(rows, 128) * 128) & (block < across * 4)
    tl.store(scales_at + place, code.to(tl.uint8), mask=is_place)


@triton.jit
def _load_blocks(x, at, SIDES: tl.constexpr, BLOCKS: tl.constexpr, CONTIGUOUS: tl.constexpr):
    """Loads blocks of one row as float32 ``[blocks, 1, blocks, elements]``.

    Triton gives neighboring places along the last dimensions to neighboring threads: there lie the blocks of a row, and
    if memory is contiguous along it, the elements of a load. The other elements of a block are in the same thread.
    """
    rows, columns, row_stride, column_stride, down, right = at
    ELEMENTS: tl.constexpr = SIDES[1]
    VECTOR: tl.constexpr = min(128 // x.dtype.element_ty.primitive_bitwidth, ELEMENTS)
    if CONTIGUOUS == 0:
        row = down * BLOCKS[0] + tl.arange(0, BLOCKS[0])[:, None, None]
        column = (right * BLOCKS[1] + tl.arange(0, BLOCKS[1])[None, None, :]) * ELEMENTS
        column += tl.arange(0, ELEMENTS)[None, :, None]
        elements = load_elements(x, row, column, row_stride, column_stride, (row < rows) & (column < columns))
        elements = tl.permute(elements, (0, 2, 1))
    else:
        row = down * BLOCKS[0] + tl.arange(0, BLOCKS[0])[None, :, None, None]
        column = (right * BLOCKS[1] + tl.arange(0, BLOCKS[1])[None, None, :, None]) * ELEMENTS
        column += tl.arange(0, ELEMENTS // VECTOR)[:, None, None, None] * VECTOR
        column += tl.arange(0, VECTOR)[None, None, None, :]
        elements = load_elements(x, row, column, row_stride, column_stride, (row < rows) & (column < columns))
        elements = tl.permute(elements, (1, 2, 0, 3))
    return tl.reshape(elements, (BLOCKS[0], 1, BLOCKS[1], ELEMENTS))
