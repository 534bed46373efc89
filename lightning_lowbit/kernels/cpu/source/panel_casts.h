// The cast of a strip to panels, in one pass: along its rows, or along its columns.
#pragma once

#include <numeric>

#include "panels.h"
#include "random_rows.h"

namespace {

// Calls body(at, encode) for the vectors of a row, of which the last ones may lie behind its end.
template <bool kWide, class Body>
__attribute__((always_inline)) inline void for_vectors(int64_t columns, const Scales &scales, Body body) {
    if (!kWide) {
        for (int64_t at = 0; at < columns; at += kLanes) body(at, load(scales.encode + at));
        return;
    }
    const int64_t width = scales.columns_per_entry;
    if (width == 16) {  // unrolled
        for (int64_t at = 0; at < columns; at += 16)
            for (int part = 0; part < 16; part += kLanes) body(at + part, all(scales.encode[at / 16]));
        return;
    }
    for (int64_t at = 0, entry = 0; at < columns; entry++)
        for (int64_t end = width < columns - at ? at + width : columns; at < end; at += kLanes)
            body(at, all(scales.encode[entry]));
}

// Rows of codes along k wait in a buffer of this thread until there are as many as panels have, and whole tiles.
struct Lines {
    int64_t count, bytes;  // of rows, and of a row

    int8_t *at(int64_t row) const { return buffer<int8_t>(count * bytes, 0) + row % count * bytes; }
};

// Writes the buffer's rows to panels: of a rectangle from `left` on, `columns` wide.
inline void put_lines(const Lines &lines, int64_t top, int64_t left, int64_t rows, int64_t columns,
                      const Panels &panels) {
    typedef uint32_t Word4 __attribute__((vector_size(16)));
    const int64_t whole = (columns + kGroup - 1) / kGroup * kGroup;
    for (int64_t row = 0; row < rows; row++) memset(lines.at(top + row) + columns, 0, whole - columns);
    for (int64_t row = 0; row < rows; row += 4) {
        const int8_t *line = lines.at(top + row);
        int8_t *target = panels.word(top + row, left);
        for (int64_t at = 0; at < whole; at += kGroup, target += kGroup * kRows) {
            Word4 a = read<Word4>(line + at), b = read<Word4>(line + lines.bytes + at);
            Word4 c = read<Word4>(line + 2 * lines.bytes + at), d = read<Word4>(line + 3 * lines.bytes + at);
            Word4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
            Word4 over_ab = __builtin_shufflevector(a, b, 2, 6, 3, 7), over_cd = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            const Word4 words[kWords] = {
                __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                __builtin_shufflevector(over_ab, over_cd, 0, 1, 4, 5), __builtin_shufflevector(over_ab, over_cd, 2, 3, 6, 7)};
            for (int i = 0; i < kWords; i++) memcpy(target + i * kWordStride, words + i, sizeof(Word4));
        }
    }
}

template <bool kStochastic, bool kWide, class In>
void round_to_panels(const Strip<In> &strip, const Scales &scales, const CastNumbers &numbers,
                     const RandomRows<In> *random_rows, const Lines &lines, const Panels &panels) {
    const Grid grid = numbers.element;
    const Units units(grid, panels.offset);
    const bool is_tensor = numbers.statistic != kBlockMax && !numbers.per_block;
    auto code = [&](int64_t row, int64_t at, F32 encode, const uint16_t *random) __attribute__((always_inline)) {
        const In *x = strip.x + row * strip.stride + at;
        F32 value = at + kLanes <= strip.columns ? load(x) : load(x, int(std::max<int64_t>(strip.columns - at, 0)));
        if (is_tensor) value = value + (value - value);  // infinities become NaN
        value = value * encode;
        value = kStochastic ? round_stochastic(value, grid, lengthen(read<U16>(random + at))) : round_nearest(value, grid);
        return (U32)units.of(value);
    };
    if (panels.dim == 1) {
        for (int64_t row = 0; row < strip.rows; row++) {
            int8_t *line = lines.at(strip.row + row);
            const uint16_t *random = kStochastic ? random_rows->at(row) : nullptr;
            for_vectors<kWide>(strip.columns, scales, [&](int64_t at, F32 encode) __attribute__((always_inline)) {
                store_codes((uint8_t *)line + at, code(row, at, encode, random), kLanes);
            });
        }
        return;
    }
    int64_t rows = strip.row + strip.rows == panels.inner ? panels.groups() * kGroup - strip.row : strip.rows;
    const int64_t panel_bytes = panels.groups() * kGroup * kRows;
    for (int64_t row = 0; row < rows; row += kWords) {
        int8_t *target = panels.word(strip.column, strip.row + row);
        const uint16_t *random[kWords] = {};
        for (int i = 0; kStochastic && i < kWords && row + i < strip.rows; i++) random[i] = random_rows->at(row + i);
        for_vectors<kWide>(strip.columns, scales, [&](int64_t at, F32 encode) __attribute__((always_inline)) {
            U32 words = {};
            for (int i = 0; i < kWords; i++)
                if (row + i < strip.rows) words |= (code(row + i, at, encode, random[i]) & 0xffu) << (8 * i);
            memcpy(target + at / kRows * panel_bytes + at % kRows * kWords, &words, sizeof words);
        });
    }
}

// The scales of a strip: of blocks along k, each for one row of a panel, or repeated for all rows of a tile.
template <class In>
void put_panel_scales(const Strip<In> &strip, const Scales &scales, const Panels &panels) {
    const int64_t width = scales.columns_per_entry;
    if (panels.dim == 0) {
        for (int64_t block = strip.row / panels.block; block * panels.block < strip.row + strip.rows; block++)
            for (int64_t at = 0; at < strip.columns; at += kLanes) {
                F32 stored = width == 1 ? load(scales.stored + at) : all(scales.stored[at / width]);
                memcpy(panels.scale(strip.column + at, block), &stored, sizeof stored);
            }
        return;
    }
    for (int64_t row = 0; row < strip.rows; row++) {
        float *target = panels.scale(strip.row + row, strip.column / panels.block);
        const float *stored = scales.stored;
        for (int64_t at = 0; at < strip.columns; at += panels.block, target += kRows, stored += panels.block / width)
            *target = *stored;
    }
}

template <class In>
void cast_to_panels(const Strip<In> &strip, const Scales &scales, const CastNumbers &numbers,
                    const RandomRows<In> *random_rows, const Lines &lines, const Panels &panels) {
    const bool is_wide = scales.columns_per_entry != 1;
    auto round = numbers.stochastic ? is_wide ? round_to_panels<true, true, In> : round_to_panels<true, false, In>
                 : is_wide          ? round_to_panels<false, true, In>
                                    : round_to_panels<false, false, In>;
    round(strip, scales, numbers, random_rows, lines, panels);
    if (panels.block) put_panel_scales(strip, scales, panels);
}

}  // namespace
