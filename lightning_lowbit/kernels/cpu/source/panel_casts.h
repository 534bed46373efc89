// The cast of a strip to panels, in one pass: along its rows, or along its columns.
#pragma once

#include <algorithm>

#include "panels.h"
#include "random_rows.h"

namespace {

// Calls body(at, stop, entry) for columns of one entry, of `width` columns, or of a vector where each has its own.
template <bool kWide, class Body>
INLINE inline void for_entries(int64_t at, int64_t end, int64_t width, Body body) {
    if (kWide && width == kGroup) {  // so many that the compiler knows
        for (; at < end; at += kGroup) body(at, at + kGroup, at / kGroup);
    } else if (kWide) {
        for (int64_t entry = at / width, stop; at < end; at = stop, entry++) {
            stop = width < end - entry * width ? (entry + 1) * width : end;
            body(at, stop, entry);
        }
    } else {
        for (; at < end; at += kLanes) body(at, at + kLanes, at);
    }
}

// Rounds four rows of a strip, of which some may lie behind its end, and writes words of four elements of k.
template <bool kStochastic, bool kWide, bool kAll, class In>
INLINE inline void round_rows(const Strip<In> &strip, int64_t row, const Scales &scales,
                                                      const CastNumbers &numbers, const RandomRows<In> *random_rows,
                                                      const Panels &panels) {
    const Grid grid = numbers.element;
    const Units units(grid);
    const bool is_across = panels.dim == 0;
    const int64_t panel_bytes = panels.groups() * kGroup * kRows, columns = strip.columns;
    const In *x[kWords] = {};
    const float *encodes[kWords] = {};
    const uint16_t *random[kWords] = {};
    for (int i = 0; i < kWords && (kAll || row + i < strip.rows); i++) {
        x[i] = strip.x + (row + i) * strip.stride;
        encodes[i] = scales.encode + scales.place(row + i);
        if (kStochastic) random[i] = random_rows->at(row + i);
    }
    int8_t *target = is_across ? panels.word(strip.column, strip.row + row) : panels.word(strip.row + row, strip.column);
    typedef uint8_t Unsigned __attribute__((vector_size(sizeof(S8))));
    const Unsigned offset = Unsigned{} + uint8_t(panels.offset);
    auto put = [&](int64_t at, const F32(&factors)[kWords], auto is_whole) INLINE {
        I32 whole[kWords] = {};
        for (int i = 0; i < kWords; i++) {
            if (!kAll && row + i >= strip.rows) continue;
            F32 value = is_whole ? load(x[i] + at) : load(x[i] + at, int(std::max<int64_t>(columns - at, 0)));
            value = clamp_numbers(value * factors[i], grid.max);
            value = kStochastic ? to_grid(value, grid, lengthen(read<U16>(random[i] + at))) : to_grid(value, grid);
            whole[i] = units.of(value);
        }
        S8 bytes = (S8)((Unsigned)as_bytes(whole) + offset);  // of four lanes of the first row, then of the second one, ...
        if (is_across) {
            bytes = transposed(bytes);
            memcpy(target + at / kRows * panel_bytes + at % kRows * kWords, &bytes, sizeof bytes);
        } else {
            for (int i = 0; i < kLanes / kWords; i++)
                memcpy(target + (at / kWords + i) * kWordStride, (const char *)&bytes + i * kWords * kWords, kWords * kWords);
        }
    };
    auto put_columns = [&](int64_t begin, int64_t end, auto is_whole) INLINE {
        for_entries<kWide>(begin, end, scales.columns_per_entry, [&](int64_t at, int64_t stop, int64_t entry) INLINE {
            F32 factors[kWords] = {};
            for (int i = 0; i < kWords && (kAll || row + i < strip.rows); i++)
                factors[i] = kWide ? all(encodes[i][entry]) : load(encodes[i] + entry);
            for (; at < stop; at += kLanes) put(at, factors, is_whole);
        });
    };
    const int64_t whole = columns / kGroup * kGroup;
    put_columns(0, whole, std::true_type());
    if (whole < columns) put_columns(whole, whole + kGroup, std::false_type());  // filled up to a group
}

template <bool kStochastic, bool kWide, class In>
void round_to_panels(const Strip<In> &strip, const Scales &scales, const CastNumbers &numbers,
                     const RandomRows<In> *random_rows, const Panels &panels) {
    const bool fills = panels.dim == 0 && strip.row + strip.rows == panels.inner;
    const int64_t rows = fills ? panels.groups() * kGroup - strip.row : strip.rows;
    int64_t row = 0;
    for (; row + kWords <= strip.rows; row += kWords)
        round_rows<kStochastic, kWide, true>(strip, row, scales, numbers, random_rows, panels);
    for (; row < rows; row += kWords)
        round_rows<kStochastic, kWide, false>(strip, row, scales, numbers, random_rows, panels);
}

// The scales of a strip: of blocks along k, each for one row of a panel, or repeated for all rows of a tile.
template <class In>
void put_panel_scales(const Strip<In> &strip, const Scales &scales, const Panels &panels) {
    const int64_t width = scales.columns_per_entry;
    const int64_t blocks = panels.blocks(), first = (panels.dim ? strip.column : strip.row) / panels.block;
    float *scales_of_k = panels.scales + first * kRows;  // of the first panel's first row
    if (panels.dim == 0) {
        for (int64_t row = 0; row < strip.rows; row += panels.block, scales_of_k += kRows) {
            const float *entries = scales.stored + scales.place(row);
            for (int64_t column = strip.column, at = 0; at < strip.columns; at += kLanes, column += kLanes) {
                F32 stored = width == 1 ? load(entries + at) : all(entries[at / width]);
                store(scales_of_k + column / kRows * blocks * kRows + column % kRows, stored);
            }
        }
        return;
    }
    const int64_t count = (strip.columns + panels.block - 1) / panels.block, step = panels.block / width;
    for (int64_t i = 0; i < strip.rows; i++) {
        const int64_t row = strip.row + i;
        float *target = scales_of_k + row / kRows * blocks * kRows + row % kRows;
        const float *stored = scales.stored + scales.place(i);
#pragma GCC unroll 4
        for (int64_t block = 0; block < count; block++) target[block * kRows] = stored[block * step];
    }
}

template <class In>
void cast_to_panels(const Strip<In> &strip, const Scales &scales, const CastNumbers &numbers,
                    const RandomRows<In> *random_rows, const Panels &panels) {
    const bool is_wide = scales.columns_per_entry != 1;
    auto round = numbers.stochastic ? is_wide ? round_to_panels<true, true, In> : round_to_panels<true, false, In>
                 : is_wide          ? round_to_panels<false, true, In>
                                    : round_to_panels<false, false, In>;
    round(strip, scales, numbers, random_rows, panels);
    if (panels.block) put_panel_scales(strip, scales, panels);
}

}  // namespace
