// Dot products of bytes, four to a lane, by the instructions of the CPU: exact sums, the same on all of them.
#pragma once

#include <cmath>
#include <type_traits>

#include "panels.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

enum Instructions : int32_t { kLoops, kAVX2, kAVXVNNI, kAVX512VNNI, kNEON, kAVX512 };

// Dots are sums of products in each lane: one of 32 bits, or two of 16. add_dots adds those of four elements of both sides.
// x86 multiplies unsigned by signed bytes: those of the left side have an offset there.
typedef int16_t I16 __attribute__((vector_size(4 * kLanes)));
inline I32 add_pairs(I32 dots) { return dots; }
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
constexpr Instructions kInstructions = kAVX512VNNI;
typedef I32 Dots;
inline Dots add_dots(Dots dots, S8 left, S8 right) {
    return (Dots)_mm512_dpbusd_epi32((__m512i)dots, (__m512i)left, (__m512i)right);
}
#elif defined(__AVX512BW__)
constexpr Instructions kInstructions = kAVX512;
typedef I16 Dots;
inline Dots add_dots(Dots dots, S8 left, S8 right) {
    dots += (Dots)_mm512_maddubs_epi16((__m512i)left, (__m512i)right);
    return dots;
}
inline I32 add_pairs(I16 dots) { return (I32)_mm512_madd_epi16((__m512i)dots, _mm512_set1_epi16(1)); }
#elif defined(__AVX2__) && defined(__AVXVNNI__)
constexpr Instructions kInstructions = kAVXVNNI;
typedef I32 Dots;
inline Dots add_dots(Dots dots, S8 left, S8 right) {
    return (Dots)_mm256_dpbusd_avx_epi32((__m256i)dots, (__m256i)left, (__m256i)right);
}
#elif defined(__AVX2__)
constexpr Instructions kInstructions = kAVX2;
typedef I16 Dots;
inline Dots add_dots(Dots dots, S8 left, S8 right) {
    dots += (Dots)_mm256_maddubs_epi16((__m256i)left, (__m256i)right);
    return dots;
}
inline I32 add_pairs(I16 dots) { return (I32)_mm256_madd_epi16((__m256i)dots, _mm256_set1_epi16(1)); }
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr Instructions kInstructions = kNEON;
typedef I32 Dots;
inline Dots add_dots(Dots dots, S8 left, S8 right) {
    return (Dots)vdotq_s32((int32x4_t)dots, (int8x16_t)left, (int8x16_t)right);
}
#else
constexpr Instructions kInstructions = kLoops;
typedef I32 Dots;
inline Dots add_dots(Dots dots, S8 left, S8 right) {
    for (int lane = 0; lane < 4 * kLanes; lane++) dots[lane / 4] += int32_t(left[lane]) * int32_t(right[lane]);
    return dots;
}
#endif
constexpr bool kHasOffset = kInstructions != kNEON && kInstructions != kLoops;

// Those of 16 bits begin with zeros, and are added to sums of 32 later; the others are these sums.
constexpr bool kIsShort = std::is_same<Dots, I16>::value;
constexpr int32_t kMostOfDots = kIsShort ? INT16_MAX : INT32_MAX;
constexpr int64_t kProducts = kIsShort ? kGroup / 2 : kGroup;  // of a group in one sum
inline Dots begin_dots(I32 sums) { return kIsShort ? Dots{} : (Dots)sums; }
inline I32 end_dots(Dots dots, I32 sums) { return kIsShort ? add_pairs(dots) + sums : add_pairs(dots); }

inline S8 repeat_word(const int8_t *source) { return (S8)all_integers(read<int32_t>(source)); }

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr bool kHasFusedMultiplyAdd = true;
#else
constexpr bool kHasFusedMultiplyAdd = false;
#endif

// a * b + c, rounded once on all CPUs.
inline F32 fused_multiply_add(F32 a, F32 b, F32 c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return multiply_add(a, b, c);
#else
    for (int lane = 0; lane < kLanes; lane++) c[lane] = std::fma(a[lane], b[lane], c[lane]);
    return c;
#endif
}
