"""The part of a matrix that a program works on: places and values of a tile ``[rows, columns]``, or of blocks.

Blocks are ``[blocks, rows of a block, blocks, columns of a block]``. Places outside are masked and count as 0.
"""

import triton
import triton.language as tl

from lightning_lowbit.kernels.gpu.device import (
    bits_of,
    drawn_of,
    float_of,
    key_halves,
    mixed_halves,
    narrow,
    place_of,
    random_bits,
    widen,
)


@triton.jit
def tile_places(tile, rows, columns, TILE: tl.constexpr):
    """Computes rows, columns and the mask of a tile; tiles are numbered along the rows."""
    across = tl.maximum(tl.cdiv(columns, TILE[1]), 1)
    row = tile // across * TILE[0] + tl.arange(0, TILE[0])[:, None]
    column = tile % across * TILE[1] + tl.arange(0, TILE[1])[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def product_of(ends, rows, columns, SIZE: tl.constexpr, ROTATION: tl.constexpr, PRODUCTS: tl.constexpr):
    """Finds the product of a stack on which the program works, which has ``SIZE`` rows and columns of it.

    A rotation makes whole groups of its rows or columns. ``ends``, int32 ``[PRODUCTS]``, are where rows of products
    end; None for matrices of ``rows``.

    Returns:
        its number, its first row in memory and that of its result, its rows there and in the result, the columns of the
        result, and the program's place among those of the product.
    """
    GROUP: tl.constexpr = ROTATION[1] if ROTATION is not None and ROTATION[0] == 0 else 1
    WIDE: tl.constexpr = ROTATION[1] if ROTATION is not None and ROTATION[0] == 1 else 1
    width = tl.cdiv(columns, WIDE) * WIDE
    across = tl.maximum(tl.cdiv(width, SIZE[1]), 1)
    program = tl.program_id(0)
    if ends is None:
        result_rows = tl.cdiv(rows, GROUP) * GROUP
        programs = tl.cdiv(result_rows, SIZE[0]) * across
        number = program // programs
        return number, number * rows, number * result_rows, rows, result_rows, width, program % programs
    else:
        place = tl.arange(0, PRODUCTS)
        end = tl.load(ends + place)
        begin = tl.load(ends + (place - 1), mask=place > 0, other=0)
        sizes = tl.cdiv(end - begin, GROUP) * GROUP
        counts = tl.cdiv(sizes, SIZE[0]) * across
        last = tl.cumsum(counts, 0)
        number = tl.sum((last <= program).to(tl.int32), 0)
        is_own = place == number
        start = tl.sum(tl.where(is_own, begin, 0), 0)
        source_rows = tl.sum(tl.where(is_own, end - begin, 0), 0)
        result_rows = tl.sum(tl.where(is_own, sizes, 0), 0)
        result_start = tl.sum(tl.where(is_own, tl.cumsum(sizes, 0) - sizes, 0), 0)
        before = tl.sum(tl.where(is_own, last - counts, 0), 0)
        return number, start, result_start, source_rows, result_rows, width, program - before


@triton.jit
def block_places(program, columns, SIDES: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr):
    """Computes a program's place among all, and rows and columns of its ``BLOCKS`` of ``SIDES``, in ``PADDED``."""
    across = tl.maximum(tl.cdiv(columns, SIDES[1] * BLOCKS[1]), 1)
    down = program // across
    right = program % across
    row, column = places_of(down, right, SIDES, PADDED, BLOCKS)
    return down, right, row, column


@triton.jit
def places_of(down, right, SIDES: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr):
    """Computes rows and columns of the blocks of a program."""
    row = (down * BLOCKS[0] + tl.arange(0, BLOCKS[0])[:, None, None, None]) * SIDES[0]
    column = (right * BLOCKS[1] + tl.arange(0, BLOCKS[1])[None, None, :, None]) * SIDES[1]
    row += tl.arange(0, PADDED[0])[None, :, None, None]
    column += tl.arange(0, PADDED[1])[None, None, None, :]
    return row, column


@triton.jit
def first_index(down, right, offset, width, SIDES: tl.constexpr, BLOCKS: tl.constexpr):
    """Computes the index of each block's first element, uint32, in a matrix with ``width`` random numbers per row."""
    row = (down * BLOCKS[0] + tl.arange(0, BLOCKS[0])[:, None, None, None]) * SIDES[0]
    column = (right * BLOCKS[1] + tl.arange(0, BLOCKS[1])[None, None, :, None]) * SIDES[1]
    stride, first = place_of(offset, width)
    return row.to(tl.uint32) * stride + column.to(tl.uint32) + first


@triton.jit
def place_in(row, column, rows, columns, ORDER: tl.constexpr):
    """Computes places of elements in a matrix whose memory is contiguous along the axis ``ORDER``."""
    return row.to(tl.int64) * columns + column if ORDER == 1 else column.to(tl.int64) * rows + row


@triton.jit
def load_elements(x, row, column, row_stride, column_stride, mask):
    """Loads elements as float32; strides count elements."""
    at = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    return widen(tl.load(x + at, mask=mask, other=0.0))


@triton.jit
def load_rotated(x, row, column, row_stride, column_stride, mask, signs, ROTATION: tl.constexpr):
    """Loads elements with rotated groups (:func:`lightning_lowbit.quant.rotate`), rounded to the dtype of ``x``.

    The program has a tile of whole groups, or blocks in it whose sides are powers of two. ``ROTATION`` holds the axis
    of groups, their size, and the factors before and after.
    """
    elements = load_elements(x, row, column, row_stride, column_stride, mask)
    place = row if ROTATION[0] == 0 else column
    values = elements * (tl.load(signs + place % ROTATION[1]) * ROTATION[2])
    if len(elements.shape) == 2:
        COLUMNS: tl.constexpr = elements.shape[1]
    else:
        COLUMNS: tl.constexpr = elements.shape[2] * elements.shape[3]
    APART: tl.constexpr = COLUMNS if ROTATION[0] == 0 else 1
    values = _add_and_subtract(values, APART, APART * ROTATION[1])
    if ROTATION[3] != 1.0:
        values = values * ROTATION[3]
    return widen(narrow(values, x.dtype.element_ty))


@triton.jit
def _add_and_subtract(values, APART: tl.constexpr, END: tl.constexpr):
    """Adds and subtracts elements ``APART`` from each other in memory, then twice as far apart, up to ``END``."""
    if APART == END:
        return values
    else:
        pairs = tl.reshape(values, (values.numel // (2 * APART), 2, APART))
        is_first = tl.arange(0, 2)[None, :, None] == 0
        word = bits_of(pairs)
        other = float_of(tl.sum(word, 1, keep_dims=True) - word)  # the sum of two integers less one is the other one
        both = tl.where(is_first, pairs + other, other - pairs)
        return _add_and_subtract(tl.reshape(both, values.shape), 2 * APART, END)


@triton.jit
def random_at(row, column, key, offset, width, CAST: tl.constexpr):
    """Computes the random bits of elements at places of a matrix with ``width`` indices per row, as
    ``uniform_by_fours`` of quant/rounding.py, for :func:`round_stochastic`; 0 without any.

    With ``CAST.fours`` each row begins with a multiple of four. Compilers then see that neighbors share a hash.
    """
    ELEMENTS: tl.constexpr = CAST.elements
    CAPABILITY: tl.constexpr = CAST.capability
    if CAST.stochastic:
        low, high = key_halves(key)
        stride, first = place_of(offset, width)
        row, column = row.to(tl.uint32), column.to(tl.uint32)
        if CAST.fours:
            four = row * stride + first + (column & 0xFFFFFFFC)
            place = column & 3
        else:
            index = row * stride + first + column
            four = index & 0xFFFFFFFC
            place = index & 3
        word = random_bits(four, low, high)
        other = word * 0x2C1B3C6D
        other = other ^ (other >> 16)
        return drawn_of(tl.where(place < 2, word, other), (place & 1) == 1, ELEMENTS, CAPABILITY)
    else:
        return 0


@triton.jit
def pad_bytes(x, result, rows, columns, row_stride, column_stride, height, width, TILE: tl.constexpr):
    """Copies a matrix of bytes into one of ``height`` and ``width``, with zeros below and to the right."""
    row, column, is_place = tile_places(tl.program_id(0), height, width, TILE)
    at = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    values = tl.load(x + at, mask=(row < rows) & (column < columns), other=0)
    tl.store(result + (row.to(tl.int64) * width + column), values, mask=is_place)


@triton.jit
def draw_signs(x, signs, SIZE: tl.constexpr):
    """Writes the signs of a rotation that a key of ``x`` draws, for each of them: those of quant/transforms.py."""
    low, high = mixed_halves(x + tl.program_id(0), 0x48616461)
    place = tl.arange(0, SIZE)
    drawn = tl.where((random_bits(place.to(tl.uint32), low, high) >> 31) == 0, -1.0, 1.0)
    tl.store(signs + tl.program_id(0) * SIZE + place, drawn)


@triton.jit
def rotate(
    x,
    values,
    rows,
    columns,
    row_stride,
    column_stride,
    signs,
    source_rows,
    source_columns,
    TILE: tl.constexpr,
    ROTATION: tl.constexpr,
):
    """A rotated matrix in the dtype of ``x``."""
    row, column, mask = tile_places(tl.program_id(0), rows, columns, TILE)
    source_mask = (row < source_rows) & (column < source_columns)
    elements = load_rotated(x, row, column, row_stride, column_stride, source_mask, signs, ROTATION)
    result = narrow(elements, x.dtype.element_ty)
    tl.store(values + (row.to(tl.int64) * columns + column), result, mask=mask)
