// The cast of a strip to panels, in one pass: along its rows, or along its columns.
#pragma once

#include "panels.h"
#include "scales.h"

namespace {

// Calls body(at, encode) for the vectors of a row, which have `count` lanes or more.
template <bool kWide, class Body>
__attribute__((always_inline)) inline void for_vectors(int64_t columns, const Scales &scales, Body body) {
    if (!kWide) {
        for (int64_t at = 0; at < columns; at += kLanes) body(at, load(scales.encode + at));
        return;
    }
    const int64_t width = scales.columns_per_entry;
    for (int64_t at = 0, entry = 0; at < columns; entry++)
        for (int64_t end = width < columns - at ? at + width : columns; at < end; at += kLanes)
            body(at, all(scales.encode[entry]));
}

template <bool kStochastic, bool kWide, class In>
void round_to_panels(const Strip<In> &strip, const Scales &scales, const CastNumbers &numbers, uint64_t key,
                     int32_t all_columns, int32_t first, const Panels &panels) {
    const Grid grid = numbers.element;
    const Units units(grid);
    const bool is_tensor = numbers.statistic != kBlockMax && !numbers.per_block;
    const uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
    auto code = [&](int64_t row, int64_t at, F32 encode) __attribute__((always_inline)) {
        const In *x = strip.x + row * strip.stride + at;
        F32 value = at + kLanes <= strip.columns ? load(x) : load(x, int(strip.columns - at));
        if (is_tensor) value = value + (value - value);  // infinities become NaN
        value = value * encode;
        if (kStochastic) {
            U32 index = (U32)kLane + (uint32_t(strip.row + row) * uint32_t(all_columns) +
                                      uint32_t(strip.column + first + at));
            value = round_stochastic(value, grid, random_bits(index, low, high));
        } else {
            value = round_nearest(value, grid);
        }
        return (U32)units.of(value);
    };
    if (panels.dim == 1) {
        for (int64_t row = 0; row < strip.rows; row++) {
            int8_t *target = panels.word(strip.row + row, strip.column);
            for_vectors<kWide>(strip.columns, scales, [&](int64_t at, F32 encode) __attribute__((always_inline)) {
                uint8_t bytes[kLanes];
                store_codes(bytes, code(row, at, encode), kLanes);
                for (int i = 0; i < kLanes / kWords; i++)
                    memcpy(target + at * kRows + i * kWordStride, bytes + i * kWords, kWords);
            });
            if (strip.column + strip.columns == panels.inner)  // the rest of a group
                for (int64_t k = (panels.inner + kLanes - 1) / kLanes * kLanes; k % kGroup; k += kWords)
                    memset(panels.word(strip.row + row, k), 0, kWords);
        }
        return;
    }
    int64_t rows = strip.row + strip.rows == panels.inner ? panels.groups() * kGroup - strip.row : strip.rows;
    const int64_t panel_bytes = panels.groups() * kGroup * kRows;
    for (int64_t row = 0; row < rows; row += kWords) {
        int8_t *target = panels.word(strip.column, strip.row + row);
        for_vectors<kWide>(strip.columns, scales, [&](int64_t at, F32 encode) __attribute__((always_inline)) {
            U32 words = {};
            for (int i = 0; i < kWords; i++)
                if (row + i < strip.rows) words |= (code(row + i, at, encode) & 0xffu) << (8 * i);
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
        for (int64_t at = 0; at < strip.columns; at += panels.block, target += kRows) *target = scales.stored[at / width];
    }
}

template <class In>
void cast_to_panels(const Strip<In> &strip, const Scales &scales, const CastNumbers &numbers, uint64_t key,
                    int32_t all_columns, int32_t first, const Panels &panels) {
    const bool is_wide = scales.columns_per_entry != 1;
    auto round = numbers.stochastic ? is_wide ? round_to_panels<true, true, In> : round_to_panels<true, false, In>
                 : is_wide          ? round_to_panels<false, true, In>
                                    : round_to_panels<false, false, In>;
    round(strip, scales, numbers, key, all_columns, first, panels);
    if (panels.block) put_panel_scales(strip, scales, panels);
}

}  // namespace
