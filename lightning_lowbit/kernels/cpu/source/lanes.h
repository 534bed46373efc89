// Sixteen numbers at a time, by the vector extensions of GCC and Clang: one instruction each with AVX-512, two with AVX2,
// four with NEON, and plain loops elsewhere. Results are those of the scalar operations, lane by lane.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

// A function that Python calls.
#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int kLanes = 16;

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));
typedef uint16_t U16x2 __attribute__((vector_size(4 * kLanes)));

// A bfloat16: the upper half of a float.
struct BF16 {
    uint16_t bits;
};

inline F32 all(float value) { return value - F32{}; }
inline U32 all_words(uint32_t value) { return value - U32{}; }
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

// Compilers do not find these two instructions in general code.
#ifdef __AVX512BW__
inline U32 lengthen(U16 value) { return (U32)_mm512_cvtepu16_epi32((__m256i)value); }
inline U16 shorten(U32 value) { return (U16)_mm512_cvtepi32_epi16((__m512i)value); }
#else
inline U32 lengthen(U16 value) { return __builtin_convertvector(value, U32); }
inline U16 shorten(U32 value) { return __builtin_convertvector(value, U16); }
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
inline void store(float *target, F32 value) { memcpy(target, &value, sizeof value); }
inline void store(BF16 *target, F32 value) {
    U16 narrowed = narrow(value);
    memcpy(target, &narrowed, sizeof narrowed);
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

// Random bits of an element: a hash of its index and a 64-bit key, as in quant/rounding.py.
inline U32 random_bits(U32 index, uint32_t low, uint32_t high) {
    U32 word = (index ^ low) * 0x9E3779B1u;
    word = (word ^ (word >> 16)) + high;
    word = word * 0x21F0AAADu;
    word = word ^ (word >> 15);
    word = word * 0x735A2D97u;
    return word ^ (word >> 15);
}
