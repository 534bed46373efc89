// As many numbers at a time as a register holds, by the vector extensions of GCC and Clang: sixteen with AVX-512, eight with
// AVX2, four with NEON and SSE. (Of vectors wider than a register GCC compares and selects one lane at a time.) Results are
// those of the scalar operations, lane by lane, and do not depend on the number of lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX512BW__) || defined(__AVX2__)
#include <immintrin.h>
#endif

// A function that Python calls, and one that is part of its callers, whatever its size.
#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE __attribute__((always_inline))

#if defined(__AVX512BW__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));
typedef uint16_t U16x2 __attribute__((vector_size(4 * kLanes)));
typedef int8_t S8 __attribute__((vector_size(4 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

// A bfloat16: the upper half of a float.
struct BF16 {
    uint16_t bits;
};

inline F32 all(float value) { return value - F32{}; }
inline U32 all_words(uint32_t value) { return value - U32{}; }
inline I32 all_integers(int32_t value) { return value - I32{}; }
inline U32 bits(F32 value) { return (U32)value; }
inline F32 from_bits(U32 value) { return (F32)value; }

// As torch's minimum and maximum of a tensor and a number: NaN in `value` stays.
inline F32 at_most(F32 value, float limit) { return value > limit ? all(limit) : value; }
inline F32 at_least(F32 value, float limit) { return value < limit ? all(limit) : value; }
inline F32 magnitude(F32 value) { return from_bits(bits(value) & 0x7fffffffu); }

template <class T>
inline T read(const void *source) {
    T value;
    memcpy(&value, source, sizeof value);
    return value;
}

// Compilers do not find these instructions in general code.
#if defined(__AVX512BW__)
inline U32 lengthen(U16 value) { return (U32)_mm512_cvtepu16_epi32((__m256i)value); }
inline U16 shorten(U32 value) { return (U16)_mm512_cvtepi32_epi16((__m512i)value); }
inline I32 lengthen(Bytes value) { return (I32)_mm512_cvtepi8_epi32((__m128i)value); }
#elif defined(__AVX2__)
inline U32 lengthen(U16 value) { return (U32)_mm256_cvtepu16_epi32((__m128i)value); }
inline U16 shorten(U32 value) {
    __m256i whole = (__m256i)(value & 0xffffu);
    return (U16)_mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
}
inline I32 lengthen(Bytes value) { return (I32)_mm256_cvtepi8_epi32(_mm_set1_epi64x((int64_t)value)); }
#else
inline U32 lengthen(U16 value) { return __builtin_convertvector(value, U32); }
inline U16 shorten(U32 value) { return __builtin_convertvector(value, U16); }
inline I32 lengthen(Bytes value) { return __builtin_convertvector(value, I32); }
#endif

// a * b + c, with one rounding where the CPU has an instruction for it (as torch's lerp), and roots.
#if defined(__AVX512BW__)
inline F32 multiply_add(F32 a, F32 b, F32 c) { return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline F32 square_root(F32 value) { return (F32)_mm512_sqrt_ps((__m512)value); }
#elif defined(__AVX2__) && defined(__FMA__)
inline F32 multiply_add(F32 a, F32 b, F32 c) { return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline F32 square_root(F32 value) { return (F32)_mm256_sqrt_ps((__m256)value); }
#else
inline F32 multiply_add(F32 a, F32 b, F32 c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    for (int lane = 0; lane < kLanes; lane++) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
#else
    return a * b + c;
#endif
}
inline F32 square_root(F32 value) {
    for (int lane = 0; lane < kLanes; lane++) value[lane] = __builtin_sqrtf(value[lane]);
    return value;
}
#endif

inline F32 widen(U16 value) { return from_bits(lengthen(value) << 16); }

// To the nearest bfloat16, ties to even; NaN stays NaN.
inline U16 narrow(F32 value) {
    U32 word = bits(value);
    U32 rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    U32 quiet = (word >> 16) | 0x40u;
    return shorten((word & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// The bfloat16 with the upper bits of a float that is one, or NaN.
inline U16 truncate(F32 value) { return shorten(bits(value) >> 16); }

inline F32 load(const float *source) { return read<F32>(source); }
inline F32 load(const BF16 *source) { return widen(read<U16>(source)); }
inline F32 load(const int32_t *source) { return __builtin_convertvector(read<I32>(source), F32); }
inline F32 load(const int8_t *source) { return __builtin_convertvector(lengthen(read<Bytes>(source)), F32); }
inline void store(float *target, F32 value) { memcpy(target, &value, sizeof value); }
inline void store(BF16 *target, F32 value) {
    U16 narrowed = narrow(value);
    memcpy(target, &narrowed, sizeof narrowed);
}

// Vectors made of a function of the lane, and a vector whose lane i is lane pick(i) of `a` followed by `b`.
template <class Vector, class Function, size_t... kAt>
constexpr Vector make_lanes(Function function, std::index_sequence<kAt...>) {
    return Vector{function(int(kAt))...};
}
using Lanes = std::make_index_sequence<kLanes>;
constexpr I32 kLane = make_lanes<I32>([](int lane) { return lane; }, Lanes());

template <int kFirst, int kStep, class Vector, size_t... kAt>
inline Vector every(Vector a, Vector b, std::index_sequence<kAt...>) {
    return __builtin_shufflevector(a, b, (kFirst + kStep * int(kAt))...);
}
template <int kFirst, size_t... kAt>
inline U32 pair(U32 a, U32 b, std::index_sequence<kAt...>) {
    return __builtin_shufflevector(a, b, (kFirst + int(kAt) / 2 + int(kAt) % 2 * kLanes)...);
}
template <int kApart, size_t... kAt>
inline F32 swap_lanes(F32 value, std::index_sequence<kAt...>) {
    return __builtin_shufflevector(value, value, (int(kAt) ^ kApart)...);
}

// Four vectors of small whole numbers as bytes: four lanes of the first, of the second, of the third and of the fourth, then
// the next four lanes of each. Transposed, each of these squares has the four of a lane side by side.
inline S8 as_bytes(const I32 (&v)[4]) {
#if defined(__AVX512BW__)
    return (S8)_mm512_packs_epi16(_mm512_packs_epi32((__m512i)v[0], (__m512i)v[1]),
                                  _mm512_packs_epi32((__m512i)v[2], (__m512i)v[3]));
#elif defined(__AVX2__)
    return (S8)_mm256_packs_epi16(_mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]),
                                  _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]));
#else
    S8 bytes;
    for (int i = 0; i < 4 * kLanes; i++) bytes[i] = int8_t(v[i / 4 % 4][i / 16 * 4 + i % 4]);
    return bytes;
#endif
}
template <size_t... kAt>
inline S8 transposed(S8 squares, std::index_sequence<kAt...>) {
    return __builtin_shufflevector(squares, squares, (int(kAt) / 16 * 16 + int(kAt) % 4 * 4 + int(kAt) / 4 % 4)...);
}
inline S8 transposed(S8 squares) { return transposed(squares, std::make_index_sequence<4 * kLanes>()); }

// The largest of all lanes.
template <int kApart = kLanes / 2>
inline int32_t largest(I32 value) {
    if constexpr (kApart == 0) {
        return value[0];
    } else {
        I32 other = (I32)swap_lanes<kApart>((F32)value, Lanes());
        return largest<kApart / 2>(value > other ? value : other);
    }
}

// The first `count` lanes of memory, the others zero; and back.
template <class T>
inline F32 load(const T *source, int count) {
    if (count >= kLanes) return load(source);
    T buffer[kLanes] = {};
    memcpy(buffer, source, count * sizeof(T));
    return load(buffer);
}
template <class T>
inline void store(T *target, F32 value, int count) {
    if (count >= kLanes) return store(target, value);
    T buffer[kLanes];
    store(buffer, value);
    memcpy(target, buffer, count * sizeof(T));
}

// Random bits of an index: a hash of it and a 64-bit key, as in quant/rounding.py.
inline U32 random_bits(U32 index, uint32_t low, uint32_t high) {
    U32 word = (index ^ low) * 0x9E3779B1u;
    word = (word ^ (word >> 16)) + high;
    word = word * 0x21F0AAADu;
    word = word ^ (word >> 15);
    word = word * 0x735A2D97u;
    return word ^ (word >> 15);
}

// As mix_key of quant/rounding.py.
inline uint64_t mix(uint64_t key) {
    key += 0x9E3779B97F4A7C15ull;
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9ull;
    key = (key ^ (key >> 27)) * 0x94D049BB133111EBull;
    return key ^ (key >> 31);
}

// Writes random numbers of 16 bits for `count` indices from a multiple of four on, and for fewer than 4 * kLanes more: four
// from each hash.
inline void write_random(uint16_t *target, uint32_t first, int64_t count, uint32_t low, uint32_t high) {
    for (int64_t at = 0; at < count; at += 4 * kLanes) {
        U32 words = random_bits((U32)(4 * kLane) + (first + uint32_t(at)), low, high), others = words * 0x2C1B3C6Du;
        others = others ^ (others >> 16);
        U32 pairs = pair<0>(words, others, Lanes()), more = pair<kLanes / 2>(words, others, Lanes());
        memcpy(target + at, &pairs, sizeof pairs);
        memcpy(target + at + 2 * kLanes, &more, sizeof more);
    }
}
