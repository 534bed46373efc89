// Codes of elements and scales, as in formats.py, and several codes to a byte, as in quant/packed.py.
#pragma once

#include "floats.h"
#include "rounding.h"

// What the codes of a format mean: a sign and a magnitude, whole numbers, numbers above -max; and codes of scales alone.
enum Coding : int32_t { kSignMagnitude, kTwosComplement, kOffset, kUnsigned, kExponent, kWord, kBF16Word, kFP16Word };

// Elements as codes of `bits`, which `output.values` points to, and block scales as codes, one of a tile after the other.
struct Codes {
    uint8_t *scales;
    Coding coding, scale_coding;
    int32_t bits;

    int per_byte() const { return 8 / bits; }
};

constexpr uint32_t kNaNCode = 127;  // of a magnitude in 7 bits

typedef uint64_t U64 __attribute__((vector_size(4 * kLanes)));
typedef uint8_t U8Half __attribute__((vector_size(kLanes / 2)));

// The code of magnitudes on a grid: the float with its exponent moved, and below the normal numbers its multiple of a step.
inline U32 code_of_magnitude(F32 value, const Grid &grid) {
    U32 word = bits(magnitude(value));
    const uint32_t least = uint32_t(grid.min_exponent + 127) << 23;
    U32 below = bits(from_bits(word) + from_bits(all_words(least))) - least;
    U32 code = (word < least ? below : word - least + (1u << 23)) >> (23 - grid.mantissa_bits);
    return word > 0x7f800000u ? all_words(kNaNCode) : code;
}

inline F32 magnitude_of_code(U32 code, const Grid &grid) {
    const uint32_t least = uint32_t(grid.min_exponent + 127) << 23;
    U32 word = code << (23 - grid.mantissa_bits);
    F32 below = from_bits(word + least) - from_bits(all_words(least));
    return word < (1u << 23) ? below : from_bits(word + (least - (1u << 23)));
}

inline U32 code_of(F32 value, const Grid &grid, const Codes &codes) {
    if (codes.coding == kSignMagnitude) {
        U32 code = code_of_magnitude(value, grid) & ((1u << (codes.bits - 1)) - 1);  // NaN may be wider
        return value < 0.0f ? code | (1u << (codes.bits - 1)) : code;
    }
    I32 whole = __builtin_convertvector(value == value ? value : all(0.0f), I32);
    if (codes.coding == kOffset) whole += int32_t(grid.max);
    return (U32)whole & ((1u << codes.bits) - 1);
}

inline F32 value_of(U32 code, const Grid &grid, const Codes &codes) {
    const int unused = 32 - codes.bits;
    if (codes.coding == kSignMagnitude) {
        U32 sign = (code << unused) & 0x80000000u, rest = code & ((1u << (codes.bits - 1)) - 1);
        U32 value = bits(magnitude_of_code(rest, grid)) | sign;
        return codes.bits == 8 && grid.max >= 448.0f ? (rest == kNaNCode ? all(__builtin_nanf("")) : from_bits(value))
                                                     : from_bits(value);
    }
    I32 whole = codes.coding == kOffset ? (I32)code - int32_t(grid.max) : (I32)(code << unused) >> unused;
    return __builtin_convertvector(whole, F32);
}

// Elements of an operand, in its dtype.
inline void put(float *target, F32 value, int count) { store(target, value, count); }
inline void put(BF16 *target, F32 value, int count) { store(target, value, count); }
inline void put(int8_t *target, F32 value, int count) {
    store_codes((uint8_t *)target, (U32)__builtin_convertvector(value, I32), count);
}

// Writes the codes of `count` elements from the element `index` on, which begins a byte.
inline void put_codes(const Codes &codes, uint8_t *target, int64_t index, U32 code, int count) {
    const int per_byte = codes.per_byte(), bits = codes.bits;
    target += index / per_byte;
    if (per_byte == 1) return store_codes(target, code, count);
    if (per_byte == 2 && count == kLanes) {
        U64 pairs = (U64)code;
        U8Half joined = __builtin_convertvector((pairs | pairs >> (32 - bits)) & 0xffu, U8Half);
        memcpy(target, &joined, sizeof joined);
        return;
    }
    for (int at = 0; at < count; at += per_byte) {
        uint32_t joined = 0;
        for (int i = 0; i < per_byte && at + i < count; i++) joined |= code[at + i] << (i * bits);
        target[at / per_byte] = uint8_t(joined);
    }
}

inline U32 take_codes(const Codes &codes, const uint8_t *source, int64_t index, int count) {
    const int per_byte = codes.per_byte(), bits = codes.bits;
    const uint32_t mask = (1u << bits) - 1;
    source += index / per_byte;
    if (per_byte == 1) return lengthen(load_codes(source, count));
    if (per_byte == 2 && count == kLanes) {
        U64 pairs = __builtin_convertvector(read<U8Half>(source), U64);
        return (U32)(pairs | pairs << (32 - bits)) & mask;
    }
    U32 code = {};
    for (int at = 0; at < count; at++) code[at] = source[at / per_byte] >> (at % per_byte * bits) & mask;
    return code;
}

// The code of one scale, at its place among all of them.
inline void put_scale(const Codes &codes, int64_t place, float value, const Grid &grid) {
    if (codes.scale_coding == kWord) {
        memcpy(codes.scales + 4 * place, &value, sizeof value);
    } else if (codes.scale_coding == kExponent) {
        codes.scales[place] = uint8_t(read<uint32_t>(&value) >> 23);
    } else if (codes.scale_coding == kBF16Word || codes.scale_coding == kFP16Word) {
        const bool is_bf16 = codes.scale_coding == kBF16Word;
        uint16_t word = uint16_t(is_bf16 ? bits(all(value))[0] >> 16 : code_of_magnitude(all(value), grid)[0]);
        if (value != value) word = is_bf16 ? 0x7fc0 : 0x7e00;
        memcpy(codes.scales + 2 * place, &word, sizeof word);
    } else {
        codes.scales[place] = uint8_t(code_of_magnitude(all(value), grid)[0]);
    }
}

// `count` scales from a place on, as far as there are some; those of kExponent are powers of two.
inline F32 take_scales(const Codes &codes, int64_t place, const Grid &grid, int count) {
    if (codes.scale_coding == kWord) {
        F32 values = {};
        memcpy(&values, codes.scales + 4 * place, sizeof(float) * count);
        return values;
    }
    if (codes.scale_coding == kBF16Word || codes.scale_coding == kFP16Word) {
        U16 words = {};
        memcpy(&words, codes.scales + 2 * place, sizeof(uint16_t) * count);
        if (codes.scale_coding == kBF16Word) return widen(words);
        U32 halves = lengthen(words);
        return halves > 0x7c00u ? all(__builtin_nanf("")) : magnitude_of_code(halves, grid);
    }
    U32 code = lengthen(load_codes(codes.scales + place, count));
    F32 nan = all(__builtin_nanf(""));
    if (codes.scale_coding == kExponent) {
        F32 value = from_bits(code ? code << 23 : all_words(1u << 22));
        return code == 255u ? nan : value;
    }
    return code == kNaNCode ? nan : magnitude_of_code(code, grid);
}
