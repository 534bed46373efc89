// AVX-512 and VNNI in plain C++, for CPUs with AVX2: those instructions that the kernels use, by their names.
// -D__AVX512BW__ takes the code for AVX-512; EMULATED_AVX512VNNI and EMULATED_AVXVNNI that for VNNI.
#pragma once

#pragma push_macro("__AVX512BW__")
#undef __AVX512BW__  // the compiler has no such instructions
#include_next <immintrin.h>
#pragma pop_macro("__AVX512BW__")

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define asm(...)  // keeps vectors in registers that there are not

template <class To, class From>
To same_bits(const From &from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// The elements of a vector.
template <class T, int kCount>
struct Elements {
    T at[kCount];

    template <class Vector>
    explicit Elements(const Vector &vector) : Elements(same_bits<Elements>(vector)) {}
    Elements() = default;
};
template <class T, class Vector>
Elements<T, sizeof(Vector) / sizeof(T)> elements(const Vector &vector) {
    return Elements<T, sizeof(Vector) / sizeof(T)>(vector);
}

template <class Out, int kCount, class Element>
Out make(Element element) {
    using T = decltype(element(0));
    Elements<T, kCount> result;
    for (int i = 0; i < kCount; i++) result.at[i] = element(i);
    return same_bits<Out>(result);
}

template <class To, class From>
To saturated(From value) {
    return To(std::clamp<From>(value, std::numeric_limits<To>::min(), std::numeric_limits<To>::max()));
}

template <class Vector>
Vector dpbusd(Vector sums, Vector left, Vector right) {
    auto s = elements<uint32_t>(sums);
    auto l = elements<uint8_t>(left);
    auto r = elements<int8_t>(right);
    for (size_t i = 0; i < sizeof(Vector); i++) s.at[i / 4] += uint32_t(int32_t(l.at[i]) * r.at[i]);
    return same_bits<Vector>(s);
}
template <class Vector>
Vector maddubs(Vector left, Vector right) {
    auto l = elements<uint8_t>(left);
    auto r = elements<int8_t>(right);
    return make<Vector, sizeof(Vector) / 2>([&](int i) {
        return saturated<int16_t>(int32_t(l.at[2 * i]) * r.at[2 * i] + int32_t(l.at[2 * i + 1]) * r.at[2 * i + 1]);
    });
}
template <class Vector>
Vector madd(Vector left, Vector right) {
    auto l = elements<int16_t>(left), r = elements<int16_t>(right);
    return make<Vector, sizeof(Vector) / 4>(
        [&](int i) { return l.at[2 * i] * r.at[2 * i] + l.at[2 * i + 1] * r.at[2 * i + 1]; });
}
template <class From, class To>  // within each 16 bytes those of `low`, then those of `high`
__m512i packs(__m512i low, __m512i high) {
    auto l = elements<From>(low), h = elements<From>(high);
    constexpr int kHalf = 16 / sizeof(From);
    return make<__m512i, 64 / sizeof(To)>([&](int i) {
        const int at = i / (2 * kHalf) * kHalf + i % kHalf;
        return saturated<To>((i / kHalf % 2 ? h : l).at[at]);
    });
}
template <class From, class To, class Out, class In>
Out convert(In vector) {
    auto from = elements<From>(vector);
    return make<Out, sizeof(In) / sizeof(From)>([&](int i) { return To(from.at[i]); });
}

#define _mm256_dpbusd_avx_epi32 dpbusd<__m256i>
#define _mm512_dpbusd_epi32 dpbusd<__m512i>
#define _mm512_maddubs_epi16 maddubs<__m512i>
#define _mm512_madd_epi16 madd<__m512i>
#define _mm512_packs_epi32 packs<int32_t, int16_t>
#define _mm512_packs_epi16 packs<int16_t, int8_t>
#define _mm512_cvtepi32_epi16 convert<int32_t, int16_t, __m256i>
#define _mm512_cvtepi32_epi8 convert<int32_t, int8_t, __m128i>
#define _mm512_cvtepi8_epi32 convert<int8_t, int32_t, __m512i>
#define _mm512_cvtepu16_epi32 convert<uint16_t, int32_t, __m512i>
#define _mm512_set1_epi16(value) (make<__m512i, 32>([](int) { return int16_t(value); }))
#define _mm512_fmadd_ps(a, b, c) \
    (make<__m512, 16>([&](int i) { return std::fma(elements<float>(a).at[i], elements<float>(b).at[i], elements<float>(c).at[i]); }))
#define _mm512_sqrt_ps(a) (make<__m512, 16>([&](int i) { return std::sqrt(elements<float>(a).at[i]); }))
#define _mm512_cvtph_ps(a) \
    (make<__m512, 16>([&](int i) { return _cvtsh_ss(elements<uint16_t>(a).at[i]); }))

#if defined(EMULATED_AVX512VNNI)
#define __AVX512VNNI__ 1
#elif defined(EMULATED_AVXVNNI)
#define __AVXVNNI__ 1
#endif
