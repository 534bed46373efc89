// Floating-point numbers of 16 and 8 bits.
#pragma once

#include "lanes.h"

typedef uint8_t U8 __attribute__((vector_size(kLanes)));

// Layouts of a mantissa, an exponent and a sign in bit kSign, as in formats.py. A code of 8 bits stands for kOfHalf times
// the half that has its exponent and mantissa.
struct FP16 {
    static constexpr int kMantissa = 10, kBias = 15, kSign = 15;
    static constexpr bool kIsSigned = true;
    uint16_t bits;
};
struct E4M3 {
    static constexpr int kMantissa = 3, kBias = 7, kSign = 7;
    static constexpr bool kIsSigned = true;
    static constexpr float kMax = 448, kOfHalf = 256;
};
struct E5M2OfSquares {  // of numbers that are not negative
    static constexpr int kMantissa = 2, kBias = 15, kSign = 7;
    static constexpr bool kIsSigned = false;
    static constexpr float kMax = 57344, kOfHalf = 1;
};

// What a mean square of 0 in FP8 is read as, in units of its scale: the bits of 2^-16.
constexpr int32_t kSmallestSquare = (127 - 16) << 23;

inline I32 smaller(I32 left, I32 right) { return left < right ? left : right; }
inline I32 larger(I32 left, I32 right) { return left > right ? left : right; }
inline U16x2 larger(U16x2 left, U16x2 right) { return left > right ? left : right; }

// What finite codes stand for. Read as a float with its exponent moved, a code is right where it is a normal number; below,
// right is twice that less the smallest normal one, which is more above. (Arithmetic on numbers below the normal ones of
// float32 would be shorter, but may be switched off.)
template <class Format>
inline F32 decode(U32 code) {
    constexpr int32_t moved = (127 - Format::kBias) << 23, one = 1 << 23;
    I32 magnitude = (I32)(code << (23 - Format::kMantissa)) & (((1 << Format::kSign) - 1) << (23 - Format::kMantissa));
    F32 smallest = (F32)all_integers(moved + one);
    I32 below = (I32)((F32)(magnitude + (moved + one)) - smallest);
    I32 value = smaller(magnitude + moved, below);
    if (Format::kIsSigned) value |= (I32)(code << (31 - Format::kSign)) & (I32)all_words(0x80000000u);
    return (F32)value;
}

// Stochastic rounding to codes of 8 bits, as _codes in optim/moments.py: a float's bits count numbers, so adding the draw
// below the code's last bit and cutting there rounds a magnitude up or down. Below the smallest normal number the bits of
// (value + smallest) / 2 do so; they are the larger ones there. The upper 16 bits of `random` make the draw.
template <class Format>
inline U32 encode(F32 value, U32 random) {
    constexpr int32_t cut = 23 - Format::kMantissa, drawn = (1 << cut) - (1 << (cut - 16)), middle = 1 << (cut - 17);
    constexpr int32_t smallest = (128 - Format::kBias) << 23, one = 1 << 23;
    const float max = Format::kMax;
    int32_t most;
    memcpy(&most, &max, sizeof most);
    I32 size = smaller((I32)bits(Format::kIsSigned ? magnitude(value) : value), all_integers(most));
    F32 below = multiply_add((F32)size, all(0.5f), (F32)all_integers(smallest - one));
    I32 draw = ((I32)(random >> (32 - cut)) & drawn) | (one - smallest + middle);
    U32 code = (U32)(larger(size, (I32)below) + draw) >> cut;
    return Format::kIsSigned ? code | (value < 0.0f ? all_words(1u << Format::kSign) : U32{}) : code;
}

inline F32 widen_half(U16 value) {
    U32 code = __builtin_convertvector(value, U32);
    F32 special = from_bits((code << 13) | 0x7f800000u | ((code & 0x8000u) << 16));
    return (code & 0x7c00u) == 0x7c00u ? special : decode<FP16>(code);
}

// To the nearest half, ties to even; what is too large becomes infinite, and NaN stays NaN.
inline U16 narrow_half(F32 value) {
    U32 word = bits(magnitude(value)), sign = (bits(value) >> 16) & 0x8000u;
    U32 normal = (word + 0xfffu + ((word >> 13) & 1u) - (112u << 23)) >> 13;
    U32 subnormal = bits(magnitude(value) + 0.5f) - 0x3f000000u;  // 0.5 has as its last place the smallest half
    U32 code = word < (113u << 23) ? subnormal : normal;
    code = word >= (143u << 23) ? all_words(0x7c00u) : code;
    code = code > 0x7c00u ? all_words(0x7c00u) : code;
    code = word > 0x7f800000u ? all_words(0x7e00u) : code;
    return __builtin_convertvector(code | sign, U16);
}

inline F32 load(const FP16 *source) { return widen_half(read<U16>(source)); }
inline void store(FP16 *target, F32 value) {
    U16 narrowed = narrow_half(value);
    memcpy(target, &narrowed, sizeof narrowed);
}

// The first `count` codes of 8 bits, and back, in the forms for which GCC 12 knows instructions.
inline U8 load_codes(const uint8_t *source, int count) {
    uint8_t padded[kLanes] = {};
    if (count < kLanes) memcpy(padded, source, count);
    return read<U8>(count < kLanes ? padded : source);
}
inline void store_codes(uint8_t *target, U32 codes, int count) {
#if defined(__AVX512BW__)
    U8 packed = (U8)_mm512_cvtepi32_epi8((__m512i)codes);
#elif defined(__AVX2__)
    const __m256i lowest = _mm256_set1_epi32(0x0c080400), both = _mm256_set1_epi64x(0x400000000);
    __m256i fours = _mm256_shuffle_epi8((__m256i)codes, lowest);  // in each half of the register
    U8 packed = (U8)_mm_cvtsi128_si64(_mm256_castsi256_si128(_mm256_permutevar8x32_epi32(fours, both)));
#else
    U8 packed = __builtin_convertvector(codes & 0xffu, U8);
#endif
    if (count >= kLanes)
        memcpy(target, &packed, sizeof packed);
    else
        memcpy(target, &packed, count);
}

#if defined(__AVX2__) && !defined(__AVX512BW__)
inline U32 lengthen(U8 codes) { return (U32)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)codes)); }
#else
inline U32 lengthen(U8 codes) { return __builtin_convertvector(__builtin_convertvector(codes, U16), U32); }
#endif

// What codes of 8 bits stand for, times a scale.
template <class Format>
inline F32 decode(U8 codes, float scale) {
#if defined(__AVX512BW__)
    __m256i halves = Format::kIsSigned ? _mm256_cvtepi8_epi16((__m128i)codes) : _mm256_cvtepu8_epi16((__m128i)codes);
    halves = _mm256_slli_epi16(halves, 10 - Format::kMantissa);
    if (Format::kIsSigned) halves = _mm256_and_si256(halves, _mm256_set1_epi16((short)0xbfff));
    F32 value = (F32)_mm512_cvtph_ps(halves);
    scale *= Format::kOfHalf;
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i bytes = _mm_cvtsi64_si128((int64_t)codes);
    __m128i halves = Format::kIsSigned ? _mm_cvtepi8_epi16(bytes) : _mm_cvtepu8_epi16(bytes);
    halves = _mm_slli_epi16(halves, 10 - Format::kMantissa);
    if (Format::kIsSigned) halves = _mm_and_si128(halves, _mm_set1_epi16((short)0xbfff));
    F32 value = (F32)_mm256_cvtph_ps(halves);
    scale *= Format::kOfHalf;
#else
    F32 value = decode<Format>(lengthen(codes));
#endif
    if (!Format::kIsSigned) value = (F32)larger((I32)value, all_integers(kSmallestSquare));
    return value * scale;
}
