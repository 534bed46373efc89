// The cast of a strip to panels, in one pass: along its rows, or along its columns.
#pragma once

#include <algorithm>

#include "panels.h"
#include "random_rows.h"

namespace {

// Calls body(at, entry) for the vectors of a row, filled up to whole groups; entries are of `width` columns.
template <bool kWide, class Body>
INLINE inline void for_vectors(int64_t columns, int64_t width, Body body) {
    const int64_t whole = (columns + kGroup - 1) / kGroup * kGroup;
    if (kWide && width == kGroup) {  // unrolled
        for (int64_t at = 0; at < whole; at += kGroup)
            for (int part = 0; part < kGroup; part += kLanes) body(at + part, at / kGroup);
    } else if (kWide) {
        for (int64_t at = 0, entry = 0; at < whole; entry++)
            for (int64_t end = width < whole - at ? at + width : whole; at < end; at += kLanes) body(at, entry);
    } else {
        for (int64_t at = 0; at < whole; at += kLanes) body(at, at);
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
    auto put = [&](int64_t at, int64_t entry, auto is_whole) INLINE {
        I32 whole[kWords] = {};
        for (int i = 0; i < kWords; i++) {
            if (!kAll && row + i >= strip.rows) continue;
            F32 value = is_whole ? load(x[i] + at) : load(x[i] + at, int(std::max<int64_t>(columns - at, 0)));
            value = clamp_numbers(value * (kWide ? all(encodes[i][entry]) : load(encodes[i] + entry)), grid.max);
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
    for_vectors<kWide>(columns, scales.columns_per_entry, [&](int64_t at, int64_t entry) INLINE {
        if (at + kLanes <= columns)
            put(at, entry, std::true_type());
        else
            put(at, entry, std::false_type());
    });
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
    if (panels.dim == 0) {
        for (int64_t row = 0; row < strip.rows; row += panels.block) {
            const float *entries = scales.stored + scales.place(row);
            for (int64_t at = 0; at < strip.columns; at += kLanes) {
                F32 stored = width == 1 ? load(entries + at) : all(entries[at / width]);
                memcpy(panels.scale(strip.column + at, (strip.row + row) / panels.block), &stored, sizeof stored);
            }
        }
        return;
    }
    for (int64_t row = 0; row < strip.rows; row++) {
        float *target = panels.scale(strip.row + row, strip.column / panels.block);
        const float *stored = scales.stored + scales.place(row);
        for (int64_t at = 0; at < strip.columns; at += panels.block, target += kRows, stored += panels.block / width)
            *target = *stored;
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
