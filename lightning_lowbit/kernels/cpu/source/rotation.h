// The Hadamard transform of groups of neighbors, in the order of `rotate` in quant/transforms.py: signs and a power of two,
// then sums and differences of elements 1 apart, 2 apart, ..., and what is left of 1/sqrt(size).
#pragma once

#include "peaks.h"

// How a matrix is rotated: `signs` has one for each element of a group, and is null where nothing is rotated. `dim` is the
// axis of groups, 0 or 1.
struct Rotation {
    const float *signs;
    int32_t size, dim;

    int64_t whole(int64_t count) const { return (count + size - 1) / size * size; }
    float before() const { return size < 64 ? 0.25f : 0.125f; }
};

constexpr float kRest = 0.70710678118654752440f;  // what sizes of 32 and 128 are multiplied by, too

namespace {

template <class T>
T *buffer(size_t size, int which) {
    static thread_local std::vector<T> buffers[6];
    if (buffers[which].size() < size + kLanes) buffers[which].resize(size + kLanes);
    return buffers[which].data();
}

// Sums and differences of vectors 1, 2, 4, ... apart.
template <int kCount>
INLINE inline void add_vectors(F32 *v) {
    for (int apart = 1; apart < kCount; apart *= 2)
        for (int i = 0; i < kCount; i += 2 * apart)
            for (int j = i; j < i + apart; j++) {
                F32 a = v[j], b = v[j + apart];
                v[j] = a + b;
                v[j + apart] = a - b;
            }
}

// The same of the lanes of a vector: each lane, negated in the second half of a pair, is added to its partner.
template <int kApart = 1>
inline F32 add_lanes(F32 v) {
    constexpr U32 negated = make_lanes<U32>([](int lane) { return lane & kApart ? 0x80000000u : 0u; }, Lanes());
    v = swap_lanes<kApart>(v, Lanes()) + from_bits(bits(v) ^ negated);
    if constexpr (2 * kApart < kLanes) return add_lanes<2 * kApart>(v);
    return v;
}

// A matrix [rows, columns] that is read rotated, zero-padded to whole groups; `source_rows` and `source_columns` are in
// memory.
template <class In>
struct Matrix {
    const In *x;
    int64_t source_rows, source_columns, rows, columns;
    Rotation rotation;

    Matrix(const In *x, int64_t rows, int64_t columns, const Rotation *by)
        : x(x), source_rows(rows), source_columns(columns), rows(rows), columns(columns), rotation(by ? *by : Rotation{}) {
        if (is_rotated()) (rotation.dim ? this->columns : this->rows) = rotation.whole(rotation.dim ? columns : rows);
    }

    bool is_rotated() const { return rotation.signs; }

    // A rectangle of whole groups, in memory or, rotated and rounded to the type of the matrix, in a buffer of this thread.
    const In *read(int64_t top, int64_t left, int64_t height, int64_t width, int64_t &stride) const {
        stride = is_rotated() ? (width + kLanes - 1) / kLanes * kLanes : columns;
        if (!is_rotated()) return x + top * stride + left;
        In *target = buffer<In>(height * stride, 5);
        rotate(top, left, height, width, target, stride);
        return target;
    }

    // Writes a rectangle; each row of `target` has room for whole vectors.
    void rotate(int64_t top, int64_t left, int64_t height, int64_t width, In *target, int64_t stride) const {
        using Rotate = void (Matrix::*)(int64_t, int64_t, int64_t, int64_t, In *, int64_t) const;
        static const Rotate in_rows[4] = {&Matrix::template rotate_rows<16>, &Matrix::template rotate_rows<32>,
                                          &Matrix::template rotate_rows<64>, &Matrix::template rotate_rows<128>};
        static const Rotate in_columns[4] = {&Matrix::template rotate_columns<16>, &Matrix::template rotate_columns<32>,
                                             &Matrix::template rotate_columns<64>, &Matrix::template rotate_columns<128>};
        int which = rotation.size == 16 ? 0 : rotation.size == 32 ? 1 : rotation.size == 64 ? 2 : 3;
        (this->*(rotation.dim ? in_rows : in_columns)[which])(top, left, height, width, target, stride);
    }

    template <int kSize>
    void rotate_rows(int64_t top, int64_t left, int64_t height, int64_t width, In *target, int64_t stride) const {
        constexpr int kCount = kSize / kLanes;
        constexpr bool kIsOdd = kSize == 32 || kSize == 128;
        F32 signs[kCount], v[kCount];
        for (int i = 0; i < kCount; i++) signs[i] = load(rotation.signs + i * kLanes) * rotation.before();
        for (int64_t row = 0; row < height; row++)
            for (int64_t at = 0; at < width; at += kSize) {
                const In *from = x + (top + row) * source_columns + left + at;
                int64_t count = source_columns - left - at;
                for (int i = 0; i < kCount; i++) {
                    int64_t rest = count - i * kLanes;
                    v[i] = rest >= kLanes ? load(from + i * kLanes) : rest > 0 ? load(from + i * kLanes, int(rest)) : F32{};
                    v[i] = add_lanes(v[i] * signs[i]);
                }
                add_vectors<kCount>(v);
                for (int i = 0; i < kCount; i++)
                    store(target + row * stride + at + i * kLanes, kIsOdd ? v[i] * kRest : v[i]);
            }
    }

    template <int kSize>
    void rotate_columns(int64_t top, int64_t left, int64_t height, int64_t width, In *target, int64_t stride) const {
        constexpr bool kIsOdd = kSize == 32 || kSize == 128;
        float signs[kSize];
        for (int i = 0; i < kSize; i++) signs[i] = rotation.signs[i] * rotation.before();
        F32 v[kSize];
        for (int64_t row = 0; row < height; row += kSize)
            for (int64_t at = 0; at < width; at += kLanes) {
                const In *from = x + (top + row) * source_columns + left + at;
                int64_t rest_rows = source_rows - top - row, count = source_columns - left - at;
                int lanes = count < kLanes ? int(count) : kLanes;
                for (int i = 0; i < kSize; i++)
                    v[i] = (i < rest_rows ? load(from + i * source_columns, lanes) : F32{}) * signs[i];
                add_vectors<kSize>(v);
                for (int i = 0; i < kSize; i++)
                    store(target + (row + i) * stride + at, kIsOdd ? v[i] * kRest : v[i]);
            }
    }
};

// Rows and columns of the rectangles in which a matrix is rotated alone.
inline int64_t rotated_height(const Rotation &rotation) { return rotation.dim ? 8 : rotation.size; }
inline int64_t rotated_width(const Rotation &rotation) { return rotation.dim ? kPanel : rotation.size > 32 ? 64 : 256; }

// Calls body(top, left, height, width) for these rectangles, on several threads.
template <class In, class Body>
void for_rectangles(const Matrix<In> &x, int threads, Body body) {
    const int64_t height = rotated_height(x.rotation), width = rotated_width(x.rotation);
    const int64_t down = (x.rows + height - 1) / height, across = (x.columns + width - 1) / width;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && x.rows * x.columns > 8192)
    for (int64_t part = 0; part < down * across; part++) {
        int64_t top = part / across * height, left = part % across * width;
        body(part, top, left, x.rows - top < height ? x.rows - top : height,
             x.columns - left < width ? x.columns - left : width);
    }
}

template <class In>
float amax_of(const Matrix<In> &x, int threads) {
    if (!x.is_rotated()) return amax_of(x.x, x.rows * x.columns, threads);
    int64_t parts = ((x.rows + 7) / 8) * ((x.columns + 63) / 64);
    std::vector<int32_t> peaks(parts);
    for_rectangles(x, threads, [&](int64_t part, int64_t top, int64_t left, int64_t height, int64_t width) {
        int64_t stride;
        const In *values = x.read(top, left, height, width, stride);
        peaks[part] = peak_of(values, height * stride);
    });
    int32_t largest = 0;
    for (int32_t peak : peaks) largest = peak > largest ? peak : largest;
    return read<float>(&largest);
}

}  // namespace
