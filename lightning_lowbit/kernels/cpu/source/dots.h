// Dot products of bytes, four to a lane, by the instructions of the CPU: exact sums, the same on all of them.
#pragma once

#include <cmath>

#include "panels.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

// x86 multiplies unsigned by signed bytes: the bytes of one side get an offset, and sums start with what it adds, negated.
#if defined(__AVX2__)
constexpr int32_t kOffset = 16;
#else
constexpr int32_t kOffset = 0;
#endif

enum Instructions : int32_t { kLoops, kAVX2, kAVXVNNI, kAVX512VNNI, kNEON, kAVX512 };
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
constexpr Instructions kInstructions = kAVX512VNNI;
#elif defined(__AVX512BW__)
constexpr Instructions kInstructions = kAVX512;
#elif defined(__AVX2__) && defined(__AVXVNNI__)
constexpr Instructions kInstructions = kAVXVNNI;
#elif defined(__AVX2__)
constexpr Instructions kInstructions = kAVX2;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr Instructions kInstructions = kNEON;
#else
constexpr Instructions kInstructions = kLoops;
#endif

inline S8 repeat_word(const int8_t *source) { return (S8)all_integers(read<int32_t>(source)); }

// a * b + c, rounded once on all CPUs.
inline F32 fused_multiply_add(F32 a, F32 b, F32 c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return multiply_add(a, b, c);
#else
    for (int lane = 0; lane < kLanes; lane++) c[lane] = std::fma(a[lane], b[lane], c[lane]);
    return c;
#endif
}

// `start` plus the products of a group of 16 elements: lane by lane those of `left`, between -128 and 127, by those of
// `right`, between -15 and 15 and with kOffset added. Without VNNI sums of eight products are of 16 bits, which hold them.
inline I32 add_dots(I32 start, const S8 (&left)[kWords], const S8 (&right)[kWords]) {
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
    __m512i sum = (__m512i)start;
    for (int i = 0; i < kWords; i++) sum = _mm512_dpbusd_epi32(sum, (__m512i)right[i], (__m512i)left[i]);
    return (I32)sum;
#elif defined(__AVX512BW__)
    __m512i pairs[kWords];
    for (int i = 0; i < kWords; i++) pairs[i] = _mm512_maddubs_epi16((__m512i)right[i], (__m512i)left[i]);
    __m512i sums = _mm512_add_epi16(_mm512_add_epi16(pairs[0], pairs[1]), _mm512_add_epi16(pairs[2], pairs[3]));
    return (I32)_mm512_add_epi32(_mm512_madd_epi16(sums, _mm512_set1_epi16(1)), (__m512i)start);
#elif defined(__AVX2__) && defined(__AVXVNNI__)
    __m256i sum = (__m256i)start;
    for (int i = 0; i < kWords; i++) sum = _mm256_dpbusd_avx_epi32(sum, (__m256i)right[i], (__m256i)left[i]);
    return (I32)sum;
#elif defined(__AVX2__)
    __m256i pairs[kWords];
    for (int i = 0; i < kWords; i++) pairs[i] = _mm256_maddubs_epi16((__m256i)right[i], (__m256i)left[i]);
    __m256i sums = _mm256_add_epi16(_mm256_add_epi16(pairs[0], pairs[1]), _mm256_add_epi16(pairs[2], pairs[3]));
    return (I32)_mm256_add_epi32(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)), (__m256i)start);
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sum = (int32x4_t)start;
    for (int i = 0; i < kWords; i++) sum = vdotq_s32(sum, (int8x16_t)right[i], (int8x16_t)left[i]);
    return (I32)sum;
#else
    for (int i = 0; i < kWords; i++)
        for (int lane = 0; lane < 4 * kLanes; lane++) start[lane / 4] += int32_t(left[i][lane]) * int32_t(right[i][lane]);
    return start;
#endif
}
