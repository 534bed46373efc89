"""The kernels of an optimizer's step: each launch works on the shards of a batch that are alike.

``x`` is a table of addresses and sizes, int64 ``[P, fields]``, with the fields of a
:class:`lightning_lowbit.kernels.shards.ParameterShard` at the places ``AT``. A program takes ``BLOCKS`` times 128
elements of one shard: its pair in ``tiles`` says which row of the table, and which of the shard's tiles. ``ALIGNED``
says that addresses and lengths of rows are multiples of 16.
"""

import triton
import triton.language as tl

from lightning_lowbit.kernels.gpu.codes import value_of
from lightning_lowbit.kernels.gpu.device import (
    at_least,
    at_most,
    bits_of,
    key_halves,
    magnitude_bits,
    narrow,
    random_bits,
    widen,
)

_BLOCK = tl.constexpr(128)
_INFINITY = tl.constexpr(float("inf"))
_FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def measure_shards(
    x,
    tiles,
    amaxes,
    shards,
    AT: tl.constexpr,
    FIELD: tl.constexpr,
    SOURCE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Raises ``amaxes``, the bits of float32 ``[P]``, to the largest magnitudes; NaN is the largest."""
    row, shard, tile = _shard_of(x, tiles, AT)
    _, element, mask, _, _ = _places(shard, tile, AT, False, BLOCKS, ALIGNED)
    values = _load(tl.load(shard + FIELD), element, mask, SOURCE, ALIGNED)
    tl.atomic_max(amaxes + row, tl.max(magnitude_bits(values)))


@triton.jit
def sum_partials(x, starts, sums, shards, STEP: tl.constexpr):
    """Adds up the ``partials`` of each shard, in one order: float32 ``[2, P]``."""
    row = tl.program_id(0)
    last = tl.load(starts + row + 1)
    squares = tl.zeros((STEP,), tl.float64)
    counts = tl.zeros((STEP,), tl.float64)
    for first in range(tl.load(starts + row), last, STEP):
        place = first + tl.arange(0, STEP)
        squares += tl.load(x + 2 * place, mask=place < last, other=0.0).to(tl.float64)
        counts += tl.load(x + (2 * place + 1), mask=place < last, other=0.0).to(tl.float64)
    tl.store(sums + row, tl.sum(squares).to(tl.float32))
    tl.store(sums + (shards + row), tl.sum(counts).to(tl.float32))


@triton.jit
def pass_over_shards(
    x,
    tiles,
    numbers,
    keys,
    starts,
    partials,
    shards,
    AT: tl.constexpr,
    ROW: tl.constexpr,
    PASS: tl.constexpr,
    GRADIENT: tl.constexpr,
    DTYPE: tl.constexpr,
    RULE: tl.constexpr,
    FP8: tl.constexpr,
    MASTER: tl.constexpr,
    SUMS: tl.constexpr,
    EPS: tl.constexpr,
    MEAN: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Clips gradients, and then, by ``PASS``: "squares" only sums, "write" stores factor·clip(g) at the addresses of
    the weights, "update" is Adam.

    ``numbers``, float32 ``[K, P]``, are the numbers of a decision, at the places ``ROW``. With ``SUMS``, the sum of
    (clip(g) / unit)² of each tile and how many elements changed go to ``partials``, at the places ``starts`` [P + 1].
    ``keys``, int64 ``[P]``, make the random bits of moments, in the formats ``MEAN`` and ``SQUARE``.
    """
    row, shard, tile = _shard_of(x, tiles, AT)
    block, element, mask, is_block, index = _places(shard, tile, AT, FP8, BLOCKS, ALIGNED)
    numbers += row
    limit, ratio = tl.load(numbers + ROW.limit * shards), tl.load(numbers + ROW.ratio * shards)
    if PASS != "write":
        taken = bits_of(tl.load(numbers + ROW.taken * shards))
        is_taken = tl.zeros_like(block) + taken != 0  # a block: of one number, Triton 3.9's interpreter makes no mask
        mask, is_block = mask & is_taken, is_block & is_taken
    if GRADIENT is None:
        g = tl.zeros(element.shape, tl.float32)
    else:
        g = _load(tl.load(shard + AT.gradient), element, mask, GRADIENT, ALIGNED)
    square, squares = g, tl.load(shard + AT.mean_square)
    if PASS == "update" or RULE == "spike_clip":
        if FP8:
            square = _load_codes(squares, element, mask, SQUARE, ALIGNED)
            least: tl.constexpr = 2.0 ** (SQUARE.min_exponent - SQUARE.mantissa_bits)  # for which 0 stands
            square = at_least(square, least) * _load_scale(tl.load(shard + AT.mean_square_scale), block, is_block)
        else:
            square = _load(squares, element, mask, tl.float32, ALIGNED)
    clipped = _clip(g, limit, ratio, square, RULE)
    if SUMS:
        value = tl.div_rn(clipped, tl.load(numbers + ROW.unit * shards))
        changed = tl.abs(g) > limit if RULE == "ada_clip" else clipped != g
        place = partials + 2 * (tl.load(starts + row) + tile)
        tl.store(place, tl.sum(value * value))
        tl.store(place + 1, tl.sum(changed.to(tl.float32)))
    if PASS != "squares":
        g = clipped * tl.load(numbers + ROW.factor * shards)
        weights = tl.load(shard + AT.weights)
    if PASS == "write":
        tl.store(_pointer(weights, DTYPE, ALIGNED) + element, narrow(g, DTYPE), mask=mask)
    elif PASS == "update":
        means = tl.load(shard + AT.mean)
        if FP8:
            scale = _load_scale(tl.load(shard + AT.mean_scale), block, is_block)
            mean = _load_codes(means, element, mask, MEAN, ALIGNED) * scale
        else:
            mean = _load(means, element, mask, tl.float32, ALIGNED)
        mean = _lerp(mean, g, tl.load(numbers + ROW.weight1 * shards))
        square = _lerp(square, g * g, tl.load(numbers + ROW.weight2 * shards))

        p = _load(weights, element, mask, DTYPE, ALIGNED)
        if MASTER:
            old_scale = tl.load(numbers + ROW.old_scale * shards)
            new_scale = tl.load(numbers + ROW.new_scale * shards)
            masters = _pointer(tl.load(shard + AT.master), tl.float16, ALIGNED) + element
            p = tl.where(old_scale > 0, tl.load(masters, mask=mask, other=0.0).to(tl.float32) * old_scale, p)
        rate, decay = tl.load(numbers + ROW.rate * shards), tl.load(numbers + ROW.decay * shards)
        p = p * (1 - decay) - tl.div_rn(mean, tl.sqrt_rn(square) + EPS) * rate
        if MASTER:
            scaled = tl.div_rn(p, new_scale)
            master = at_least(at_most(scaled, _FP16_MAX), -_FP16_MAX).to(tl.float16)
            tl.store(masters, master, mask=mask)
            p = master.to(tl.float32) * new_scale
        tl.store(_pointer(weights, DTYPE, ALIGNED) + element, narrow(p, DTYPE), mask=mask)

        if FP8:
            low, high = key_halves(keys + row)
            word = random_bits(index, low, high)
            scales = tl.load(shard + AT.mean_scale)
            _encode(mean, means, scales, block, element, mask, is_block, word >> 16, MEAN, ALIGNED)
            scales = tl.load(shard + AT.mean_square_scale)
            _encode(square, squares, scales, block, element, mask, is_block, word & 0xFFFF, SQUARE, ALIGNED)
        else:
            tl.store(_pointer(means, tl.float32, ALIGNED) + element, mean, mask=mask)
            tl.store(_pointer(squares, tl.float32, ALIGNED) + element, square, mask=mask)


# --- places and memory ------------------------------------------------------------------------------------------------


@triton.jit
def _shard_of(x, tiles, AT: tl.constexpr):
    """Returns the program's row of the table, a pointer to it, and the number of its tile."""
    pair = tiles + 2 * tl.program_id(0)
    row = tl.load(pair)
    return row, x + row * (AT.number + 1), tl.load(pair + 1)


@triton.jit
def _places(shard, tile, AT: tl.constexpr, BY_ROWS: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr):
    """Numbers of the tile's blocks ``[BLOCKS, 1]`` and of its elements ``[BLOCKS, 128]``, which of both exist, and the
    elements' indices in the whole parameter. Blocks end with rows, if these count."""
    size = tl.load(shard + AT.size)
    length = tl.load(shard + AT.row)
    if ALIGNED:
        size, length = tl.multiple_of(size, 16), tl.multiple_of(length, 16)
    block = tile * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    column = tl.arange(0, _BLOCK)[None, :]
    if BY_ROWS:
        across = tl.cdiv(length, _BLOCK).to(tl.int32)
        line = (block // across).to(tl.int64)
        first = (block % across) * _BLOCK
        column = first + column
        index = tl.load(shard + AT.first) + line * tl.load(shard + AT.stride) + column
        is_line = line * length < size
        return block, line * length + column, is_line & (column < length), is_line, index.to(tl.uint32)
    else:
        element = block.to(tl.int64) * _BLOCK + column
        return block, element, element < size, block.to(tl.int64) * _BLOCK < size, element.to(tl.uint32)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(address, element, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    return widen(tl.load(_pointer(address, DTYPE, ALIGNED) + element, mask=mask, other=0.0))


# --- rules and moments ------------------------------------------------------------------------------------------------


@triton.jit
def _clip(g, limit, ratio, square, RULE: tl.constexpr):
    if RULE == "ada_clip":
        return tl.where(tl.abs(g) > limit, g * ratio, g)
    elif RULE == "spike_clip":
        bound = tl.sqrt_rn(tl.where(square > 0, square * limit, _INFINITY))
        return at_most(at_least(g, -bound), bound)
    else:
        return g


@triton.jit
def _lerp(old, new, weight):
    """Interpolates as torch does, with one rounding: exact at weights of 0 and 1."""
    is_near = weight < 0.5
    weights = tl.zeros(old.shape, tl.float32) + tl.where(is_near, weight, weight - 1)
    return tl.fma(weights, new - old, tl.where(is_near, old, new))


@triton.jit
def _load_codes(address, element, mask, GRID: tl.constexpr, ALIGNED: tl.constexpr):
    codes = tl.load(_pointer(address, tl.uint8, ALIGNED) + element, mask=mask, other=0)
    return value_of(codes.to(tl.int32), GRID)


@triton.jit
def _load_scale(address, block, is_block):
    return tl.load(_pointer(address, tl.float32, False) + block, mask=is_block, other=0.0)


@triton.jit
def _encode(values, codes, scales, block, element, mask, is_block, random, GRID: tl.constexpr, ALIGNED: tl.constexpr):
    """Writes codes, rounded stochastically by 16 random bits as in optim/moments.py, and the scales of blocks."""
    CUT: tl.constexpr = 23 - GRID.mantissa_bits
    SMALLEST: tl.constexpr = (GRID.min_exponent + 127) << 23
    values = tl.where(mask, values, 0.0)
    scale = tl.div_rn(tl.max(tl.abs(values), axis=1, keep_dims=True), GRID.max)
    tl.store(_pointer(scales, tl.float32, False) + block, scale, mask=is_block)
    scaled = tl.div_rn(values, tl.where(scale > 0, scale, _INFINITY))
    magnitude = at_most(tl.abs(scaled), GRID.max)
    word = tl.maximum(bits_of(magnitude), bits_of(magnitude * 0.5 + 2.0 ** (GRID.min_exponent - 1)))
    draw = (random << (CUT - 16)).to(tl.int32) + ((1 << (CUT - 17)) + (1 << 23) - SMALLEST)
    code = (word + draw) >> CUT
    code = tl.where(scaled < 0, code | 0x80, code).to(tl.uint8)
    tl.store(_pointer(codes, tl.uint8, ALIGNED) + element, code, mask=mask)
