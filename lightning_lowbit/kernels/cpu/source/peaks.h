// The largest magnitudes of columns, of neighboring blocks and of a matrix, and the mean magnitude.
#pragma once

#include <type_traits>
#include <vector>

#include "floats.h"

namespace {

constexpr int64_t kPanel = 512;  // columns that fit a cache, eight rows of them
constexpr int64_t kRow = 2048;   // the same, one row of them

// Neighbors compared: lane i has the larger of lanes 2i and 2i + 1 of `a` followed by `b`.
inline U16x2 larger_of_pairs(U16x2 a, U16x2 b) {
    using Halves = std::make_index_sequence<2 * kLanes>;
    U16x2 even = every<0, 2>(a, b, Halves()), odd = every<1, 2>(a, b, Halves());
    return larger(even, odd);
}

// The same within each 128 bits of both, and of neighboring 128 bits: AVX2 takes an instruction for either choice of lanes.
template <size_t... kAt>
inline I32 larger_within(F32 a, F32 b, std::index_sequence<kAt...>) {
    F32 even = __builtin_shufflevector(a, b, (int(kAt) / 4 * 4 + int(kAt) % 2 * 2 + int(kAt) / 2 % 2 * kLanes)...);
    F32 odd = __builtin_shufflevector(a, b, (int(kAt) / 4 * 4 + int(kAt) % 2 * 2 + int(kAt) / 2 % 2 * kLanes + 1)...);
    return larger((I32)even, (I32)odd);
}
template <size_t... kAt>
inline I32 larger_across(I32 a, I32 b, std::index_sequence<kAt...>) {
    I32 even = __builtin_shufflevector(a, b, (int(kAt) / 4 * 8 + int(kAt) % 4)...);
    I32 odd = __builtin_shufflevector(a, b, (int(kAt) / 4 * 8 + int(kAt) % 4 + 4)...);
    return larger(even, odd);
}

// Lane i has the largest lane of vector i, of as many as there are lanes.
inline I32 largest_lanes(I32 *vectors) {
    for (int count = kLanes / 2; count > 0; count /= 2)
        for (int i = 0; i < count; i++)
            vectors[i] = kLanes / count <= 4 ? larger_within((F32)vectors[2 * i], (F32)vectors[2 * i + 1], Lanes())
                                             : larger_across(vectors[2 * i], vectors[2 * i + 1], Lanes());
    return vectors[0];
}

// Lane i has the largest magnitude of block i, of neighboring ones of kWidth numbers; of bfloat16 the upper bits are enough.
template <int kWidth>
inline I32 largest_of_blocks(const BF16 *x) {
    U16x2 vectors[kWidth / 2];
    for (int i = 0; i < kWidth / 2; i++) vectors[i] = read<U16x2>(x + i * 2 * kLanes) & 0x7fff;
    for (int count = kWidth / 4; count > 0; count /= 2)
        for (int i = 0; i < count; i++) vectors[i] = larger_of_pairs(vectors[2 * i], vectors[2 * i + 1]);
    U32 pairs = (U32)vectors[0];
    return larger((I32)(pairs << 16), (I32)(pairs & 0xffff0000u));
}
template <int kWidth>
inline I32 largest_of_blocks(const float *x) {
    I32 vectors[kLanes];
    for (int i = 0; i < kLanes; i++, x += kWidth) {
        vectors[i] = (I32)magnitude(load(x));
        for (int at = kLanes; at < kWidth; at += kLanes) vectors[i] = larger(vectors[i], (I32)magnitude(load(x + at)));
    }
    return largest_lanes(vectors);
}

// Magnitudes as integers have the order of the numbers, with infinity and NaN above.
template <class In>
inline I32 peak_of_column(const In *x, int64_t stride, int64_t rows, int count) {
    I32 peak = {};
    if (count == kLanes)
#pragma GCC unroll 4
        for (int64_t row = 0; row < rows; row++) peak = larger(peak, (I32)magnitude(load(x + row * stride)));
    else
        for (int64_t row = 0; row < rows; row++) peak = larger(peak, (I32)magnitude(load(x + row * stride, count)));
    return peak;
}

// The same of all columns, row by row, as memory has them; of bfloat16 the upper bits are enough.
template <class In>
void largest_of_columns(const In *x, int64_t stride, int64_t rows, int64_t columns, int32_t *peaks) {
    if constexpr (std::is_same<In, BF16>::value) {
        int64_t at = 0;
        for (; at + 2 * kLanes <= columns; at += 2 * kLanes) memset(peaks + at, 0, sizeof(U16x2));
        const int64_t whole = at;
        for (int64_t row = 0; row < rows; row += 4)
            for (at = 0; at < whole; at += 2 * kLanes) {
                U16x2 peak = read<U16x2>(peaks + at);
                for (int64_t i = row; i < row + 4 && i < rows; i++) peak = larger(peak, read<U16x2>(x + i * stride + at) & 0x7fff);
                memcpy(peaks + at, &peak, sizeof peak);
            }
        for (at = 0; at < whole; at += 2 * kLanes)
            for (int half = 1; half >= 0; half--) {
                U32 peak = lengthen(read<U16>((uint16_t *)(peaks + at) + half * kLanes)) << 16;
                memcpy(peaks + at + half * kLanes, &peak, sizeof peak);
            }
        x += whole, peaks += whole, columns -= whole;
    }
    for (int64_t at = 0; at < columns; at += kLanes) {
        I32 peak = peak_of_column(x + at, stride, rows, int(columns - at < kLanes ? columns - at : kLanes));
        memcpy(peaks + at, &peak, sizeof peak);
    }
}

// The bits of the largest magnitude of neighbors; vectors of bfloat16 are compared in 16 bits.
template <class In>
int32_t peak_of(const In *x, int64_t count) {
    constexpr bool kIsShort = std::is_same<In, BF16>::value;
    using Vector = std::conditional_t<kIsShort, U16x2, I32>;
    constexpr int kCount = sizeof(Vector) / sizeof(In);
    Vector peaks[4] = {};
    int64_t at = 0;
    for (; at + 4 * kCount <= count; at += 4 * kCount)
        for (int i = 0; i < 4; i++)
            peaks[i] = larger(peaks[i], read<Vector>(x + at + i * kCount) & (kIsShort ? 0x7fff : 0x7fffffff));
    Vector most = larger(larger(peaks[0], peaks[1]), larger(peaks[2], peaks[3]));
    I32 peak = (I32)most;
    if (kIsShort) peak = larger((I32)((U32)most << 16), (I32)((U32)most & 0xffff0000u));
    for (; at < count; at += kLanes)
        peak = larger(peak, (I32)magnitude(load(x + at, int(count - at < kLanes ? count - at : kLanes))));
    return largest(peak);
}

template <class In>
float amax_of(const In *x, int64_t count, int threads) {
    constexpr int64_t kChunk = kPanel * 64;
    int64_t chunks = (count + kChunk - 1) / kChunk;
    int32_t largest = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(max : largest) if (threads > 1 && chunks > 1)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t rest = count - chunk * kChunk;
        int32_t peak = peak_of(x + chunk * kChunk, rest < kChunk ? rest : kChunk);
        largest = peak > largest ? peak : largest;
    }
    return read<float>(&largest);
}

template <class In>
void peaks_of_rows(const In *x, int64_t rows, int64_t columns, float *peaks, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * columns > 8192)
    for (int64_t row = 0; row < rows; row++) {
        int32_t peak = peak_of(x + row * columns, columns);
        memcpy(peaks + row, &peak, sizeof peak);
    }
}

template <class In>
void peaks_of_columns(const In *x, int64_t rows, int64_t columns, float *peaks, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * columns > 8192)
    for (int64_t at = 0; at < columns; at += kLanes) {
        int count = int(columns - at < kLanes ? columns - at : kLanes);
        store(peaks + at, (F32)peak_of_column(x + at, columns, rows, count), count);
    }
}

// The mean magnitude, summed in double by rows.
template <class In>
float mean_of(const In *x, int64_t rows, int64_t columns, int threads) {
    std::vector<double> sums(rows);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 64)
    for (int64_t row = 0; row < rows; row++) {
        double sum[16] = {};
        for (int64_t at = 0; at < columns; at += kLanes) {
            F32 value = magnitude(load(x + row * columns + at, int(columns - at < kLanes ? columns - at : kLanes)));
            for (int lane = 0; lane < kLanes; lane++) sum[at % 16 + lane] += value[lane];
        }
        for (double part : sum) sums[row] += part;
    }
    double total = 0;
    for (double sum : sums) total += sum;
    return float(total / double(rows * columns > 1 ? rows * columns : 1));
}

}  // namespace
