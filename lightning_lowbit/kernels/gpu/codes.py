"""The kernels for packed operands: codes and block scales as :mod:`lightning_lowbit.quant.packed` lays them out.

A program takes ``[blocks, rows of a block, blocks, columns of a block]``, of which neighboring columns share a byte.
"""

import triton
import triton.language as tl

from lightning_lowbit.kernels.gpu.device import bits_of, e4m3_codes, float_of, magnitude_bits, stored
from lightning_lowbit.kernels.gpu.scales import block_scales, round_elements, stored_scales, tensor_scales
from lightning_lowbit.kernels.gpu.tiles import block_places, load_elements, random_at, tile_places

_NAN = tl.constexpr(127)  # of a magnitude in 7 bits
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _code_of_magnitude(value, GRID: tl.constexpr):
    least: tl.constexpr = (GRID.min_exponent + 127) << 23
    bits = magnitude_bits(value)
    below = bits_of(float_of(bits) + float_of(tl.full((), least, tl.int32))) - least
    code = tl.where(bits < least, below, bits - least + (1 << 23)) >> (23 - GRID.mantissa_bits)
    return tl.where(bits > _INFINITY_BITS, _NAN, code)


@triton.jit
def code_of_scale(scale, CAST: tl.constexpr):
    """Scales of one byte."""
    STORAGE: tl.constexpr = CAST.storage
    if CAST.scale == "e8m0":
        return (bits_of(scale) >> 23) & 0xFF
    elif CAST.capability >= 89 and STORAGE.max == 448.0:
        return e4m3_codes(scale)
    else:
        return _code_of_magnitude(scale, STORAGE)


@triton.jit
def _magnitude_of_code(code, GRID: tl.constexpr):
    least: tl.constexpr = (GRID.min_exponent + 127) << 23
    word = code << (23 - GRID.mantissa_bits)
    below = float_of(word + least) - float_of(tl.full((), least, tl.int32))
    return tl.where(word < (1 << 23), below, float_of(word + (least - (1 << 23))))


@triton.jit
def code_of(value, GRID: tl.constexpr):
    if GRID.coding == "sign-magnitude":  # a product with a power of two leaves the format's exponent in that of float32
        bits = bits_of(value * 2.0 ** (-126 - GRID.min_exponent))
        code = (bits >> (23 - GRID.mantissa_bits)) & ((1 << (GRID.bits - 1)) - 1)
        if GRID.bits == 8:
            code = tl.where(value == value, code, _NAN)
        return code | ((bits >> (32 - GRID.bits)) & (1 << (GRID.bits - 1)))
    else:
        whole = tl.where(value == value, value, 0.0).to(tl.int32)
        if GRID.coding == "offset":
            whole += tl.cast(GRID.max, tl.int32)
        return whole & ((1 << GRID.bits) - 1)


@triton.jit
def value_of(code, GRID: tl.constexpr):
    if GRID.coding == "sign-magnitude":
        rest = code & ((1 << (GRID.bits - 1)) - 1)
        value = _magnitude_of_code(rest, GRID)
        value = tl.where(code == rest, value, -value)
        if GRID.bits == 8:
            value = tl.where(rest == _NAN, float("nan"), value)
        return value
    elif GRID.coding == "offset":
        return code.to(tl.float32) - GRID.max
    else:
        return tl.where(code >= (1 << (GRID.bits - 1)), code - (1 << GRID.bits), code).to(tl.float32)


@triton.jit
def joined_codes(codes, GRID: tl.constexpr, SIDES: tl.constexpr):
    """Bytes of neighboring columns: half or a quarter as many; ``SIDES`` is the shape of ``codes``."""
    rows: tl.constexpr = SIDES[0] * SIDES[1]
    columns: tl.constexpr = SIDES[2] * SIDES[3]
    joined = tl.reshape(codes, (rows, columns))
    if GRID.bits <= 4:
        even, odd = tl.split(tl.reshape(joined, (rows, columns // 2, 2)))
        joined = even | odd << GRID.bits
    if GRID.bits == 2:
        low, high = tl.split(tl.reshape(joined, (rows, columns // 4, 2)))
        joined = low | high << 4
    return joined


@triton.jit
def pack_blocks(
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
):
    """Packs blocks of ``SIDES``, powers of two, of which a program has ``BLOCKS``."""
    ELEMENTS: tl.constexpr = CAST.elements
    down, right, row, column = block_places(tl.program_id(0), columns, SIDES, SIDES, BLOCKS)
    mask = (row < rows) & (column < columns)
    elements = load_elements(x, row, column, row_stride, column_stride, mask)

    encode, decode = tensor_scales(amax, CAST)
    if tl.program_id(0) == 0:
        tl.store(factor, decode)
    scales, by, zeros = block_scales(elements, mask, encode, decode, 0, key, CAST)
    width = tl.cdiv(columns, SIDES[1]) * SIDES[1]
    random = random_at(row, column, key, offset, width, CAST)
    rounded = round_elements(elements, 1.0, by, zeros, random, CAST)
    shape: tl.constexpr = (BLOCKS[0], SIDES[0], BLOCKS[1], SIDES[1])
    joined = joined_codes(code_of(rounded, ELEMENTS), ELEMENTS, shape)
    count: tl.constexpr = 8 // ELEMENTS.bits
    wide: tl.constexpr = SIDES[1] * BLOCKS[1] // count
    byte_row = down * (BLOCKS[0] * SIDES[0]) + tl.arange(0, BLOCKS[0] * SIDES[0])[:, None]
    byte = right * wide + tl.arange(0, wide)[None, :]
    here = byte_row.to(tl.int64) * (columns // count) + byte
    tl.store(codes + here, joined.to(tl.uint8), mask=(byte_row < rows) & (byte < columns // count))

    stored_scale = stored_scales(scales, CAST)
    down_block = down * BLOCKS[0] + tl.arange(0, BLOCKS[0])[:, None, None, None]
    right_block = right * BLOCKS[1] + tl.arange(0, BLOCKS[1])[None, None, :, None]
    place = down_block.to(tl.int64) * tl.cdiv(columns, SIDES[1]) + right_block
    is_block = (down_block * SIDES[0] < rows) & (right_block * SIDES[1] < columns)
    if CAST.scale == "fp32":
        for number in tl.static_range(4):
            part = (bits_of(stored_scale) >> (8 * number)) & 0xFF
            tl.store(scales_at + place * 4 + number, part.to(tl.uint8), mask=is_block)
    else:
        tl.store(scales_at + place, code_of_scale(stored_scale, CAST).to(tl.uint8), mask=is_block)


@triton.jit
def unpack_blocks(
    x,
    scales_at,
    values,
    rows,
    columns,
    CAST: tl.constexpr,
    SIDES: tl.constexpr,
    TILE: tl.constexpr,
    THROUGH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Decodes values from the bytes of codes ``x`` and of block scales."""
    ELEMENTS: tl.constexpr = CAST.elements
    STORAGE: tl.constexpr = CAST.storage
    row, column, mask = tile_places(tl.program_id(0), rows, columns, TILE)
    count: tl.constexpr = 8 // ELEMENTS.bits
    joined = tl.load(x + (row.to(tl.int64) * (columns // count) + column // count), mask=mask, other=0).to(tl.int32)
    code = (joined >> (column % count * ELEMENTS.bits)) & ((1 << ELEMENTS.bits) - 1)
    value = value_of(code, ELEMENTS)
    if CAST.scaled:
        place = (row // SIDES[0]).to(tl.int64) * tl.cdiv(columns, SIDES[1]) + column // SIDES[1]
        if CAST.scale == "fp32":
            word = tl.zeros(TILE, tl.int32)
            for number in tl.static_range(4):
                part = tl.load(scales_at + place * 4 + number, mask=mask, other=0).to(tl.int32)
                word |= part << (8 * number)
            scale = float_of(word)
        else:
            code = tl.load(scales_at + place, mask=mask, other=0).to(tl.int32)
            if CAST.scale == "e8m0":
                scale = tl.where(code == 255, float("nan"), float_of(tl.maximum(code << 23, 1 << 22)))
            else:
                scale = tl.where(code == _NAN, float("nan"), _magnitude_of_code(code, STORAGE))
        value = value * scale
    value = stored(value, THROUGH, DTYPE)
    tl.store(values + (row.to(tl.int64) * columns + column), value, mask=mask)
