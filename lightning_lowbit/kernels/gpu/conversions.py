"""Codes of E2M1 by the instruction of Blackwell GPUs, in PTX: those of quant/rounding.py but for NaN, for which the
scale of its block stands.

``cvt.rn.satfinite.e2m1x2.f32`` rounds to nearest, with ties to the even code, saturates, and makes a byte of two codes.
``cvt.rs``, which rounds stochastically, takes other random bits than ours.
"""

import triton
import triton.language as tl

from lightning_lowbit.kernels.gpu.device import bits_of

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
