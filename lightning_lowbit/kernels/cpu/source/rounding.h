// Rounding to the grid of a format, and the scales of blocks: the arithmetic of quant/rounding.py and quant/scaling.py,
// operation by operation.
#pragma once

#include <cfloat>

#include "lanes.h"

// The fields of a format that its grid needs.
struct Grid {
    float max;
    int32_t min_exponent, mantissa_bits;
};

enum Statistic : int32_t { kBlockMax, kTensorMax, kTensorMean };
enum ScaleKind : int32_t { kNearest, kUp, kPowerOfTwo, kBFloat16, kFloat16, kFloat, kFloatPowerOfTwo };
enum SecondLevel : int32_t { kNone, kOfTensor, kOfRows };
enum FourOverSix : int32_t { kOff, kSquared, kAbsolute };

// A cast along one dimension, as casts.py fills it in. A side of a tile is 0 for all there is.
struct CastNumbers {
    Grid element, scale;
    int32_t input, output;  // the numbers of dtypes: 0 float, 1 bfloat16, 2 int8
    int32_t tile_rows, tile_columns;
    int32_t statistic, kind, four_over_six;
    int32_t two_level, per_block, stochastic;
    int32_t stochastic_scales, correction;  // whether scales draw random bits; elements of a corrected group, or 0
    int32_t exact, through_bf16;  // elements times scales are bfloat16 numbers; or are rounded to them first
    int32_t top_exponent;     // of kPowerOfTwo: element.max = top * 2^top_exponent
    float round_up_from;      // of kPowerOfTwo: mantissas from which the scale is one power of two larger
    float numerator;          // of two levels: S times its amax
    float prescale, epsilon, factor, size;
};

// S, the scale of the tensor or of rows, and 1/S or 1/prescale.
struct Level {
    F32 encode, decode;
};

inline F32 select_nan(F32 finite_where, F32 value) {
    return (bits(finite_where) & 0x7fffffffu) < 0x7f800000u ? value : all(__builtin_nanf(""));
}

// Bits of the power of two below each magnitude, not below that of the smallest binade.
inline U32 binade(F32 value, const Grid &grid) {
    I32 exponent = (I32)bits(value) & 0x7f800000, least = all_integers((grid.min_exponent + 127) << 23);
    return (U32)(exponent > least ? exponent : least);
}

// A sum with 1.5 * 2^23 steps keeps no digit below a step.
inline F32 to_multiple(F32 value, U32 binade, const Grid &grid) {
    F32 magic = from_bits(binade + ((uint32_t(23 - grid.mantissa_bits) << 23) + 0x00400000u));
    return (value + magic) - magic;
}

inline F32 clamp(F32 value, float limit) { return at_most(at_least(value, -limit), limit); }

// The same, but NaN becomes the limit: codes have none, and the scale shows it.
inline F32 clamp_numbers(F32 value, float limit) { return at_least(value < limit ? value : all(limit), -limit); }

// Of values that the grid spans.
inline F32 to_grid(F32 value, const Grid &grid) { return to_multiple(value, binade(value, grid), grid); }

inline F32 round_nearest(F32 value, const Grid &grid) { return to_grid(clamp(value, grid.max), grid); }

inline F32 round_up(F32 value, const Grid &grid) {
    F32 nearest = round_nearest(value, grid);
    F32 step = from_bits(binade(nearest, grid) - (uint32_t(grid.mantissa_bits) << 23));
    F32 above = at_most(nearest + step, grid.max);
    return nearest < value ? above : nearest;
}

// With random numbers r of 16 bits: the value plus (r + 1/2 - 2^15) * 2^-16 steps, rounded to nearest.
inline F32 to_grid(F32 value, const Grid &grid, U32 random) {
    U32 power = binade(value, grid);
    F32 draw = __builtin_convertvector((I32)random, F32) - 32767.5f;
    F32 unit = from_bits(power - (uint32_t(grid.mantissa_bits + 16) << 23));
    return to_multiple(multiply_add(draw, unit, value), power, grid);  // the product is exact
}

inline F32 round_stochastic(F32 value, const Grid &grid, U32 random) {
    return to_grid(clamp(value, grid.max), grid, random);
}

// 2^exponent for exponents from -127 to 127.
inline F32 power_of_two(I32 exponent) {
    return from_bits(exponent >= -126 ? (U32)(exponent + 127) << 23 : all_words(1u << 22));
}

// The exponent k of values 2^k * m > 0, and m in [1, 2).
inline I32 split_exponent(F32 value, F32 &mantissa) {
    I32 is_subnormal = value < FLT_MIN;
    U32 word = bits(is_subnormal ? value * 0x1p24f : value);
    mantissa = from_bits((word & 0x007fffffu) | 0x3f800000u);
    return (I32)(word >> 23) - 127 - (is_subnormal & 24);
}

inline F32 scale_exmy(F32 wanted, const CastNumbers &numbers) {
    return numbers.kind == kUp ? round_up(wanted, numbers.scale) : round_nearest(wanted, numbers.scale);
}

// s of blocks (e for float scales) from their statistics. Without random bits they round to nearest.
inline F32 scales_of(F32 amax, F32 encode, const CastNumbers &numbers, const U32 *random) {
    F32 scales;
    if (numbers.kind == kFloat || numbers.kind == kFloatPowerOfTwo) {
        F32 amount = at_least(amax, numbers.epsilon) * numbers.factor;
        scales = at_most(at_least(all(numbers.size) / amount, 0x1p-128f + 0x1p-149f), FLT_MAX);
        if (numbers.kind == kFloatPowerOfTwo) {
            F32 mantissa;
            I32 exponent = split_exponent(scales, mantissa);
            scales = power_of_two(exponent < -127 ? exponent * 0 - 127 : exponent);
        }
        scales = amount > 0.0f ? scales : all(1.0f);
    } else if (numbers.kind == kPowerOfTwo) {
        F32 wanted = at_most(amax * encode, FLT_MAX), mantissa;
        I32 exponent = split_exponent(wanted, mantissa) - numbers.top_exponent;
        exponent -= mantissa >= numbers.round_up_from;  // a comparison that holds is -1
        exponent = wanted > 0.0f ? exponent : exponent * 0 - 127;
        exponent = exponent < -127 ? exponent * 0 - 127 : exponent;
        exponent = exponent > 127 ? exponent * 0 + 127 : exponent;
        scales = power_of_two(exponent);
    } else if (numbers.kind == kBFloat16) {
        scales = widen(narrow(clamp(amax / numbers.element.max * encode, numbers.scale.max)));
    } else if (numbers.kind == kFloat16) {
        scales = round_nearest(amax / numbers.element.max * encode, numbers.scale);
        scales = amax > 0.0f ? at_least(scales, power_of_two(all_integers(numbers.scale.min_exponent))[0]) : scales;
    } else {
        F32 wanted = amax * numbers.factor * (encode * (1.0f / numbers.element.max));
        scales = random ? round_stochastic(wanted, numbers.scale, *random) : scale_exmy(wanted, numbers);
    }
    return select_nan(amax, scales);
}

// What elements are multiplied by before rounding, and after it.
inline F32 encode_factor(F32 scales, const Level &level, const CastNumbers &numbers) {
    if (numbers.kind >= kFloat) return scales;
    return at_most(1.0f / (scales * level.decode), FLT_MAX);
}
inline F32 stored_scale(F32 scales, const CastNumbers &numbers) { return numbers.kind >= kFloat ? 1.0f / scales : scales; }

// From the amaxes of tensors or rows.
inline Level level_of(F32 amax, const CastNumbers &numbers) {
    Level level = {all(1.0f), all(1.0f / numbers.prescale)};
    if (numbers.two_level) {
        F32 scale = at_most(at_least(numbers.numerator / amax, FLT_MIN), FLT_MAX);
        level.encode = (amax > 0.0f) & (amax <= FLT_MAX) ? scale : level.encode;
        level.decode = 1.0f / level.encode;
    }
    return level;
}

// Elements on a grid as whole numbers of its smallest step.
struct Units {
    float per_one;

    explicit Units(const Grid &grid) {
        int32_t word = (127 + grid.mantissa_bits - grid.min_exponent) << 23;
        memcpy(&per_one, &word, sizeof word);
    }
    I32 of(F32 value) const { return __builtin_convertvector(value * per_one, I32); }
};
