"""Functions of the kernels: rounding, random bits and dtypes, bit for bit those of quant/rounding.py.

Binades are found in the bits of a float, maxima of magnitudes are taken of their bits, where NaN is the largest. Every
division is IEEE's; kernels are launched with ``enable_fp_fusion=False``, so that no product is fused into a sum.
``CAST`` and ``GRID`` are the named tuples of :mod:`lightning_lowbit.kernels.numbers`.
"""

import triton
import triton.language as tl

_INFINITY_BITS = tl.constexpr(0x7F800000)
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def bits_of(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(value):
    return bits_of(value) & 0x7FFFFFFF


@triton.jit
def at_most(value, limit):
    """Clamps from above, by a limit that is no NaN; values that are NaN stay, as with ``Tensor.clamp``.

    Not by ``tl.minimum`` with ``propagate_nan``, after which Triton 3.8 may store transposed bytes wrongly.
    """
    return tl.where(value >= limit, limit, value)


@triton.jit
def at_least(value, limit):
    return tl.where(value <= limit, limit, value)


@triton.jit
def widen(x):
    """Converts float32, float16, bfloat16 or integers to float32."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


# --- rounding ---------------------------------------------------------------------------------------------------------


@triton.jit
def _power(value, GRID: tl.constexpr):
    """The largest power of two that is at most |value|, but no less than 2^min_exponent."""
    return float_of(tl.maximum(bits_of(value) & _INFINITY_BITS, (GRID.min_exponent + 127) << 23))


@triton.jit
def _to_multiple(value, near, GRID: tl.constexpr):
    """Rounds ``value`` to the nearest multiple of the step at ``near``. The fused products are exact."""
    if GRID.is_uniform:
        magic = 1.5 * 2.0 ** (23 + GRID.min_exponent - GRID.mantissa_bits)
        return (value + magic) - magic
    else:
        power, magic = _power(near, GRID), 1.5 * 2.0 ** (23 - GRID.mantissa_bits)
        return tl.fma(power, -magic, tl.fma(power, magic, value))


@triton.jit
def _clamped(value, GRID: tl.constexpr, KEEPS_NAN: tl.constexpr):
    """Clamps to the range of a grid. Where a scale is NaN anyway, NaN may become a number, in half the instructions."""
    if KEEPS_NAN:
        return at_least(at_most(value, GRID.max), -GRID.max)
    else:
        return tl.maximum(tl.minimum(value, GRID.max), -GRID.max)


@triton.jit
def round_nearest(value, GRID: tl.constexpr, KEEPS_NAN: tl.constexpr = True):
    value = _clamped(value, GRID, KEEPS_NAN)
    near = value
    if GRID.mantissa_bits == 0:  # the even code is not the even multiple: see quant/rounding.py
        above = ((bits_of(value) >> 23) & 0xFF) - (GRID.min_exponent + 127)
        is_tie = ((bits_of(value) & 0x7FFFFF) == 0x400000) & (above > 0) & ((above & 1) == 1)
        value = tl.where(is_tie, value * 0.75, value)
    return _to_multiple(value, near, GRID)


@triton.jit
def round_up(value, GRID: tl.constexpr):
    nearest = round_nearest(value, GRID)
    above = at_most(nearest + _power(nearest, GRID) * 2.0 ** (-GRID.mantissa_bits), GRID.max)
    return tl.where(nearest < value, above, nearest)


@triton.jit
def round_stochastic(value, drawn, GRID: tl.constexpr, KEEPS_NAN: tl.constexpr = True):
    """Rounds to one of two neighbors, by floats of random bits (:func:`drawn_of`)."""
    value = _clamped(value, GRID, KEEPS_NAN)
    # A draw, `uniform - 1/2` of quant/rounding.py, in steps of the grid at 1. Differences and products are exact.
    least: tl.constexpr = 2.0 ** (-1 - GRID.mantissa_bits)
    draw = drawn - (256 * least + least) + least / 65536
    power = tl.full(value.shape, 2.0**GRID.min_exponent, tl.float32) if GRID.is_uniform else _power(value, GRID)
    return _to_multiple(tl.fma(draw, power, value), value, GRID)


@triton.jit
def drawn_of(word, is_upper, GRID: tl.constexpr, CAPABILITY: tl.constexpr):
    """Makes floats of the upper or lower 16 bits of words: they are the last ones of a float in [2^k, 2^(k + 1)), whose
    last place is the unit of draws in steps of the grid at 1."""
    BASE: tl.constexpr = (134 - GRID.mantissa_bits) << 23
    if CAPABILITY == 0:
        return float_of((tl.where(is_upper, word >> 16, word & 0xFFFF) | BASE).to(tl.int32, bitcast=True))
    else:  # compilers take two or three instructions
        selector = tl.where(is_upper, 0x7632, 0x7610)
        word, selector = tl.broadcast(word, selector)
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [word, tl.full(word.shape, BASE, tl.int32), selector],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return float_of(bits)


@triton.jit
def random_bits(index, low, high):
    """Draws 32 bits, as random_bits of quant/rounding.py."""
    word = (index ^ low) * 0x9E3779B1
    word = (word ^ (word >> 16)) + high
    word = word * 0x21F0AAAD
    word = word ^ (word >> 15)
    word = word * 0x735A2D97
    return word ^ (word >> 15)


@triton.jit
def key_halves(key):
    """Loads the two halves of a key (pointer to an int64), uint32."""
    word = tl.load(key).to(tl.uint64, bitcast=True)
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@triton.jit
def mixed_halves(key, SALT: tl.constexpr):
    """Loads a key (pointer to an int64), and computes the halves of another one: ``mix_key`` of quant/rounding.py."""
    word = (tl.load(key).to(tl.uint64, bitcast=True) ^ SALT) + 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word = word ^ (word >> 31)
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@triton.jit
def place_of(offset, columns):
    """Loads the columns of the global matrix and the global index of the first element, uint32."""
    if offset is None:
        return tl.cast(columns, tl.uint32), tl.cast(0, tl.uint32)
    else:
        return tl.load(offset + 1).to(tl.uint32, bitcast=True), tl.load(offset + 2).to(tl.uint32, bitcast=True)


# --- dtypes -----------------------------------------------------------------------------------------------------------


@triton.jit
def stored(values, THROUGH: tl.constexpr, DTYPE: tl.constexpr):
    """Converts ``values`` to a dtype, rounded to the dtype ``THROUGH`` on the way."""
    if THROUGH == DTYPE:
        return narrow(values, DTYPE)
    else:
        return narrow(widen(narrow(values, THROUGH)), DTYPE)


@triton.jit
def narrow(values, DTYPE: tl.constexpr):
    """Converts ``values`` to a dtype, FP8 to bytes. Triton's interpreter truncates to bfloat16, where GPUs round."""
    if DTYPE == tl.bfloat16 and _IS_INTERPRETED:
        word = values.to(tl.uint32, bitcast=True)
        word = tl.where(values == values, word + 0x7FFF + ((word >> 16) & 1), 0x7FC00000)
        return (word >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif DTYPE == tl.float8e4nv:
        return _fp8(values, 2.0**-120, 20)
    elif DTYPE == tl.float8e5:
        return _fp8(values, 2.0**-112, 21)
    elif DTYPE == tl.int8:
        return tl.where(values == values, values, 0.0).to(tl.int8)
    else:
        return values.to(DTYPE)


@triton.jit
def _fp8(values, LEAST: tl.constexpr, SHIFT: tl.constexpr):
    """Codes of values on the grid. A product with a power of two leaves the exponent of FP8 in that of float32."""
    bits = bits_of(values * LEAST)
    codes = ((bits & 0x7FFFFFFF) >> SHIFT) | ((bits >> 24) & 0x80)
    return tl.where(values == values, codes, 0x7F).to(tl.uint8)


# --- codes by instructions of GPUs ------------------------------------------------------------------------------------

# They equal those of quant/rounding.py but for NaN, for which the scale of its block stands.
# ``cvt.rn.satfinite.e2m1x2.f32`` of Blackwell rounds to nearest, with ties to the even code, saturates, and makes a
# byte of two codes. ``cvt.rs``, which rounds stochastically, takes other random bits than ours.

_OUT_AND_IN = tl.constexpr("=r" + 12 * ",r")
_OUT_AND_PAIRS = tl.constexpr("=r" + 8 * ",l" + 4 * ",r")

# Operands are 0, the codes; 1 to 4 and 5 to 8, elements whose codes are the lower and the upper ones of a byte; 9 to
# 12, what multiplies both. The sum of bits finds codes that are not 0: those of -0 become those of 0.
_NEAREST = tl.constexpr(
    "{ .reg .b32 low, high, codes, sizes; .reg .b8 byte<4>; "
    + " ".join(
        f"mul.rn.f32 low, ${1 + i}, ${9 + i}; mul.rn.f32 high, ${5 + i}, ${9 + i}; "
        f"cvt.rn.satfinite.e2m1x2.f32 byte{i}, high, low;"
        for i in range(4)
    )
    + " mov.b32 codes, {byte0, byte1, byte2, byte3}; and.b32 sizes, codes, 0x77777777; "
    "add.u32 sizes, sizes, 0x77777777; or.b32 sizes, sizes, 0x77777777; and.b32 $0, codes, sizes; }"
)

# The upper halves of operands 1 to 8 are floats of random bits (`drawn_of`). In pairs, in the order of lines: v, its
# power of two by the unit in the first place (quant/rounding.py), a quarter of it, at least 1/4 and at most 1 (which
# saturates: v may be larger than 6); the draw in steps at 1, times four; v plus the draw; the nearest multiple.
_STOCHASTIC = tl.constexpr(
    "{ .reg .b64 v, power, rest, draw, by, first, last, four, less, more, magic, back; .reg .b8 byte<4>; "
    ".reg .b32 low, high, draw_low, draw_high, rest_low, rest_high; "
    "mov.b64 first, 0x4A0000014A000001; mov.b64 last, 0x3F7FFFFF3F7FFFFF; mov.b64 four, 0x4080000040800000; "
    "mov.b64 less, 0xC3808000C3808000; mov.b64 more, 0x3780000037800000; mov.b64 magic, 0x4BC000004BC00000; "
    "mov.b64 back, 0xCBC00000CBC00000; "
    + " ".join(
        f"mov.b64 {{low, draw_low}}, ${1 + i}; mov.b64 {{high, draw_high}}, ${5 + i}; "
        "mov.b64 v, {low, high}; mov.b64 draw, {draw_low, draw_high}; "
        f"mov.b64 by, {{${9 + i}, ${9 + i}}}; mul.rn.f32x2 v, v, by; "
        "mul.rn.f32x2 power, v, first; mul.rn.f32x2 rest, power, last; "
        "mov.b64 {low, high}, power; mov.b64 {rest_low, rest_high}, rest; abs.f32 low, low; abs.f32 high, high; "
        "abs.f32 rest_low, rest_low; abs.f32 rest_high, rest_high; "
        "sub.rn.sat.f32 low, low, rest_low; sub.rn.sat.f32 high, high, rest_high; "
        "max.f32 low, low, 0f3E800000; max.f32 high, high, 0f3E800000; mov.b64 power, {low, high}; "
        "fma.rn.f32x2 draw, draw, four, less; "
        "add.rn.f32x2 draw, draw, more; fma.rn.f32x2 v, draw, power, v; "
        "fma.rn.f32x2 v, power, magic, v; fma.rn.f32x2 v, power, back, v; "
        f"mov.b64 {{low, high}}, v; cvt.rn.satfinite.e2m1x2.f32 byte{i}, high, low;"
        for i in range(4)
    )
    + " mov.b32 $0, {byte0, byte1, byte2, byte3}; }"
)

_FP8_BEFORE = tl.constexpr("{ .reg .b16 low, high; .reg .b32 codes, sizes; cvt.rn.satfinite.")
_FP8_BETWEEN = tl.constexpr(".f32 low, $2, $1; cvt.rn.satfinite.")
_FP8_AFTER = tl.constexpr(
    ".f32 high, $4, $3; mov.b32 codes, {low, high}; and.b32 sizes, codes, 0x7F7F7F7F; "
    "add.u32 sizes, sizes, 0x7F7F7F7F; or.b32 sizes, sizes, 0x7F7F7F7F; and.b32 $0, codes, sizes; }"
)


@triton.jit
def e2m1_codes(elements, by, drawn, CAST: tl.constexpr, SIDES: tl.constexpr):
    """Makes bytes of two codes, uint8 ``[rows, columns / 2]``, of elements of the shape ``SIDES`` times ``by``."""
    factor, _ = _in_pairs(tl.broadcast_to(by, SIDES), SIDES)
    if CAST.stochastic:  # in one tensor, so that threads have the draws of their elements
        drawn = bits_of(drawn).to(tl.uint32, bitcast=True).to(tl.uint64) << 32
        low, high = _in_pairs(bits_of(elements).to(tl.uint32, bitcast=True).to(tl.uint64) | drawn, SIDES)
        arguments = [low, high, factor]
        return tl.inline_asm_elementwise(_STOCHASTIC, _OUT_AND_PAIRS, arguments, dtype=tl.uint8, is_pure=True, pack=4)
    else:
        low, high = _in_pairs(elements, SIDES)
        arguments = [low, high, factor]
        return tl.inline_asm_elementwise(_NEAREST, _OUT_AND_IN, arguments, dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def _in_pairs(values, SIDES: tl.constexpr):
    return tl.split(tl.reshape(values, (SIDES[0] * SIDES[1], SIDES[2] * SIDES[3] // 2, 2)))


@triton.jit
def fp8_codes(values, E5M2: tl.constexpr):
    """Makes codes of FP8, uint8, of values that are rounded to nearest, with ties to even, and saturate; NaN is 7F."""
    KIND: tl.constexpr = "e5m2x2" if E5M2 else "e4m3x2"
    ASM: tl.constexpr = _FP8_BEFORE + KIND + _FP8_BETWEEN + KIND + _FP8_AFTER
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [values], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def e4m3_codes(values):
    """Codes of values that are not negative, in E4M3: rounded to nearest, with ties to even, and saturating; int32."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 code; .reg .b32 zero; mov.b32 zero, 0; cvt.rn.satfinite.e4m3x2.f32 code, zero, $1; "
        "cvt.u32.u16 $0, code; }",
        "=r,r",
        [values],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def e4m3_rounded(values):
    """Values that are not negative, rounded to E4M3 as :func:`e4m3_codes` does."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 code, half, other; .reg .b32 zero, halves; mov.b32 zero, 0; "
        "cvt.rn.satfinite.e4m3x2.f32 code, zero, $1; cvt.rn.f16x2.e4m3x2 halves, code; "
        "mov.b32 {half, other}, halves; cvt.f32.f16 $0, half; }",
        "=r,r",
        [values],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
