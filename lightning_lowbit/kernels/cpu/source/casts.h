// The cast of an operand: blocks, their scales, elements rounded in units of them.
//
// A matrix is cut into rectangles of whole tiles that fit a cache. Within one, the largest magnitudes of its columns are
// reduced over each tile, become scales, and the elements are read again and rounded. Threads share no rectangle, and no
// result depends on their number.

#pragma once

#include <numeric>
#include <optional>

#include "codes.h"
#include "panel_casts.h"

// What a call writes.
struct Output {
    void *values;   // [rows, columns] contiguous
    float *factor;  // one per row, one per column, or one; null where there is none
    const int64_t *key;          // of stochastic rounding
    int32_t dtype;               // 0 float, 1 bfloat16, 2 int8, 3 codes, 4 panels
    int32_t all_columns, first;  // random bits belong to element `row * all_columns + column + first`
    Codes codes;                 // of dtype 3
    Panels panels;               // of dtype 4
};

namespace {

// Constants of the generated code: the bits of a style are stochastic (1), per_block (2), wide (4), exact (8).

template <unsigned kStyle, class In, class Out>
void round_strip(const Strip<In> &strip, const Scales &scales, const CastNumbers &numbers, const Output &output) {
    constexpr bool kStochastic = kStyle & 1, kPerBlock = kStyle & 2, kWide = kStyle & 4, kExact = kStyle & 8;
    constexpr bool kCodes = std::is_same<Out, Codes>::value;
    const Grid grid = numbers.element;
    const Codes codes = output.codes;
    const bool is_tensor = numbers.statistic != kBlockMax, through = numbers.through_bf16;
    const int64_t columns = strip.columns, per_entry = scales.columns_per_entry;
    std::optional<RandomRows<In>> random_rows;
    if (kStochastic) random_rows.emplace(strip, *output.key, output.all_columns, output.first);
    for (int64_t row = 0; row < strip.rows; row++) {
        const In *x = strip.x + row * strip.stride;
        const int64_t start = (strip.row + row) * strip.matrix_columns + strip.column;
        Out *values = kCodes ? nullptr : (Out *)output.values + start;
        const uint16_t *random = kStochastic ? random_rows->at(row) : nullptr;
        const float *encodes = scales.encode + scales.place(row), *decodes = scales.stored + scales.place(row);
        auto cast = [&](F32 value, F32 encode, F32 stored, int64_t at) INLINE {
            if (!kPerBlock && is_tensor) value = value + (value - value);  // infinities become NaN
            value = value * encode;
            value = kStochastic ? round_stochastic(value, grid, lengthen(read<U16>(random + at)))
                                : round_nearest(value, grid);
            if (kCodes) return value;
            if (kPerBlock) value = value * stored;
            return through ? widen(narrow(value)) : value;
        };
        auto cast_whole = [&](int64_t at, F32 encode, F32 stored) INLINE {
            F32 value = cast(load(x + at), encode, stored, at);
            if constexpr (kCodes) {
                put_codes(codes, (uint8_t *)output.values, start + at, code_of(value, grid, codes), kLanes);
            } else if constexpr (kExact) {
                U16 narrowed = truncate(value);
                memcpy(values + at, &narrowed, sizeof narrowed);
            } else {
                put(values + at, value, kLanes);
            }
        };
        int64_t at = 0, whole = columns / kLanes * kLanes;
        if (!kWide)
            for (; at < whole; at += kLanes) cast_whole(at, load(encodes + at), load(decodes + at));
        if (kWide && per_entry == 16)  // unrolled
            for (; at + 16 <= columns; at += 16)
                for (int part = 0; part < 16; part += kLanes)
                    cast_whole(at + part, all(encodes[at / 16]), all(decodes[at / 16]));
        for (int64_t entry = at / per_entry; at < whole; entry++)
            for (int64_t end = at + per_entry < whole ? at + per_entry : whole; at < end; at += kLanes)
                cast_whole(at, all(encodes[entry]), all(decodes[entry]));
        if (int count = int(columns - at)) {
            F32 encode = kWide ? all(encodes[at / per_entry]) : load(encodes + at);
            F32 stored = kWide ? all(decodes[at / per_entry]) : load(decodes + at);
            F32 value = cast(load(x + at, count), encode, stored, at);
            if constexpr (kCodes)
                put_codes(codes, (uint8_t *)output.values, start + at, code_of(value, grid, codes), count);
            else
                put(values + at, value, count);
        }
    }
}

// The codes of the scales of a strip.
template <class In>
void put_scales(const Strip<In> &strip, const Scales &scales, const CastNumbers &numbers, const Codes &codes) {
    const int64_t width = numbers.tile_columns ? numbers.tile_columns : strip.matrix_columns;
    const int64_t across = (strip.matrix_columns + width - 1) / width, blocks = (strip.columns + width - 1) / width;
    const int64_t first = (numbers.tile_rows ? strip.row / numbers.tile_rows * across : 0) + strip.column / width;
    if (scales.columns_per_entry == width && codes.scale_coding == kUnsigned) {
        for (int64_t at = 0; at < blocks; at += kLanes)
            store_codes(codes.scales + first + at, code_of_magnitude(load(scales.stored + at), numbers.scale),
                        int(blocks - at < kLanes ? blocks - at : kLanes));
        return;
    }
    for (int64_t block = 0; block < blocks; block++)
        put_scale(codes, first + block, scales.stored[block * width / scales.columns_per_entry], numbers.scale);
}

template <class In, class Out>
void round_tiles(const Strip<In> &strip, const Scales &scales, const CastNumbers &numbers, const Output &output) {
    using Round = void (*)(const Strip<In> &, const Scales &, const CastNumbers &, const Output &);
    constexpr bool kBF16 = std::is_same<Out, BF16>::value;
    constexpr unsigned kExact = kBF16 ? 8 : 0;
    static const Round rounds[16] = {
        round_strip<0, In, Out>, round_strip<1, In, Out>, round_strip<2, In, Out>, round_strip<3, In, Out>,
        round_strip<4, In, Out>, round_strip<5, In, Out>, round_strip<6, In, Out>, round_strip<7, In, Out>,
        round_strip<0 + kExact, In, Out>, round_strip<1 + kExact, In, Out>,
        round_strip<2 + kExact, In, Out>, round_strip<3 + kExact, In, Out>,
        round_strip<4 + kExact, In, Out>, round_strip<5 + kExact, In, Out>,
        round_strip<6 + kExact, In, Out>, round_strip<7 + kExact, In, Out>,
    };
    unsigned style = (numbers.stochastic ? 1 : 0) + (numbers.per_block ? 2 : 0) + (scales.columns_per_entry != 1 ? 4 : 0) +
                     (numbers.exact ? 8 : 0);
    rounds[style](strip, scales, numbers, output);
}

// Writes a strip.
template <class In, class Out>
void write_tiles(const Strip<In> &strip, const Scales &scales, const CastNumbers &numbers, const Output &output) {
    if constexpr (std::is_same<Out, Panels>::value) {
        std::optional<RandomRows<In>> random_rows;
        if (numbers.stochastic) random_rows.emplace(strip, *output.key, output.all_columns, output.first, kWords);
        cast_to_panels(strip, scales, numbers, random_rows ? &*random_rows : nullptr, output.panels);
    } else {
        round_tiles<In, Out>(strip, scales, numbers, output);
    }
}

template <class In, class Out>
void cast_strip(const Strip<In> &strip, const CastNumbers &numbers, const Output &output, const Levels &levels,
                const Draws &draws,
                const Scales *of_tensor) {
    if (of_tensor) return write_tiles<In, Out>(strip, *of_tensor, numbers, output);
    const Tiles tiles(strip, numbers);
    const int64_t width = tiles.columns, count = tiles.count, stride = tiles.stride;
    float *encode = buffer<float>(tiles.entries(), 0), *stored = buffer<float>(tiles.entries(), 1);
    scales_of_tiles(strip, tiles, numbers, levels, draws, encode, stored);
    if (numbers.correction) correct(strip, tiles, numbers, draws, encode, stored);
    for (int64_t i = 0; i < count; i++) spread(encode + i * stride, stored + i * stride, strip.columns, width);
    const Scales scales = {encode, stored, width % kLanes ? 1 : width, tiles.rows, stride};
    write_tiles<In, Out>(strip, scales, numbers, output);
    for (int64_t i = 0; i < count; i++) {
        const Strip<In> part = strip.part(i * tiles.rows, tiles.rows);
        const Scales of_part = {encode + i * stride, stored + i * stride, scales.columns_per_entry};
        if (std::is_same<Out, Codes>::value) put_scales(part, of_part, numbers, output.codes);
        if (std::is_same<Out, Codes>::value || numbers.per_block) continue;
        for (int64_t at = 0; at < (numbers.tile_rows == 0 ? part.columns : 1); at++)
            output.factor[numbers.tile_rows == 0 ? part.column + at : part.row] = of_part.stored[at] * levels.decode[0];
    }
}

template <class In>
void cast_all(const Matrix<In> &x, const float *amax, const CastNumbers &numbers, Output output, int threads) {
    int64_t rows = x.rows, columns = x.columns;
    const bool is_tensor = numbers.statistic != kBlockMax;
    const bool by_column = numbers.two_level == kOfRows && numbers.tile_columns == 1;
    int64_t count = numbers.two_level != kOfRows ? 1 : by_column ? columns : rows;
    std::vector<float> peaks(count + kLanes), encodes(count + kLanes), decodes(count + kLanes);
    if (amax)
        peaks[0] = *amax;
    else if (numbers.two_level == kOfRows)
        (by_column ? peaks_of_columns<In> : peaks_of_rows<In>)(x.x, rows, columns, peaks.data(), threads);
    else if (numbers.two_level || numbers.statistic == kTensorMax)
        peaks[0] = amax_of(x, threads);
    for (int64_t at = 0; at < count; at += kLanes) {
        Level level = level_of(load(peaks.data() + at), numbers);
        store(encodes.data() + at, level.encode);
        store(decodes.data() + at, level.decode);
    }
    Draws draws = {};
    if (numbers.stochastic_scales) {
        uint64_t key = mix(uint64_t(*output.key) ^ 0x5363616Cull);
        draws = {uint32_t(key), uint32_t(key >> 32), output.all_columns, output.first};
    }
    float encode = 1.0f, stored = 1.0f;
    if (is_tensor) {
        float statistic = numbers.statistic == kTensorMax ? peaks[0] : mean_of(x.x, rows, columns, threads);
        U32 random = draws.at(0, 0, 0);
        F32 scales = scales_of(all(statistic), all(encodes[0]), numbers, numbers.stochastic_scales ? &random : nullptr);
        encode = encode_factor(scales, {all(encodes[0]), all(decodes[0])}, numbers)[0];
        stored = stored_scale(scales, numbers)[0];
    }
    const Scales of_tensor = {&encode, &stored, int64_t(1) << 60};
    if (output.factor && numbers.two_level == kOfRows)
        memcpy(output.factor, decodes.data(), sizeof(float) * count);
    else if (output.factor && (is_tensor || numbers.per_block || output.dtype == 3))
        *output.factor = stored * decodes[0];

    // Rectangles of whole tiles, or of whole groups of them: strips of one, some rows of strips that are one row high, some
    // strips that are one row each. Rows of whole tiles are one long row.
    int64_t side = is_tensor ? 1 : numbers.tile_columns ? numbers.tile_columns : columns;
    int64_t step = is_tensor ? 1 : numbers.tile_rows ? numbers.tile_rows : rows;
    if (!numbers.tile_columns && numbers.tile_rows == 1)
        while (step < 16 && 2 * step * columns <= kRow * 8) step *= 2;
    if (numbers.correction) (numbers.tile_columns == 1 ? step : side) = numbers.correction;
    bool is_long = step == 1 && (is_tensor || numbers.tile_columns) && columns % side == 0 && numbers.two_level != kOfRows;
    if (is_long && output.dtype != 4 && !x.is_rotated() && output.all_columns == columns && output.first == 0) columns *= rows, rows = 1;
    if (output.dtype == 4) step = std::lcm(step, kRows);
    int64_t height = step, whole = side;
    if (x.is_rotated() && x.rotation.dim) whole = std::lcm(side, x.rotation.size);
    if (x.is_rotated() && !x.rotation.dim) height = std::lcm(step, x.rotation.size);
    int64_t panel = height > 64 ? 64 : height == 1 && !x.is_rotated() ? kRow : kPanel;
    int64_t width = (panel + whole - 1) / whole * whole;
    if (height == 1 && x.is_rotated()) height = 8;
    int64_t down = (rows + height - 1) / height, across = (columns + width - 1) / width;
    auto cast = output.dtype == 0   ? cast_strip<In, float>
                : output.dtype == 1 ? cast_strip<In, BF16>
                : output.dtype == 2 ? cast_strip<In, int8_t>
                : output.dtype == 3 ? cast_strip<In, Codes>
                                    : cast_strip<In, Panels>;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * columns > 8192)
    for (int64_t part = 0; part < down * across; part++) {
        int64_t left = part % across * width, top = part / across * height;
        int64_t bottom = top + height < rows ? top + height : rows;
        int64_t there = left + width < columns ? width : columns - left, stride;
        const In *values = x.read(top, left, bottom - top, there, stride);
        for (int64_t row = top; row < bottom; row += step) {
            Strip<In> strip = {values + (row - top) * stride, stride, row + step < bottom ? step : bottom - row, there,
                               row, left, columns};
            int64_t place = numbers.two_level != kOfRows ? 0 : by_column ? left : row;
            Levels levels = {encodes.data() + place, decodes.data() + place, by_column,
                             numbers.two_level == kOfRows && !by_column};
            cast(strip, numbers, output, levels, draws, is_tensor ? &of_tensor : nullptr);
        }
    }
}

}  // namespace

// cast_all of a matrix [rows, columns] of either type, each in a file of its own: they take most of the compiler's time.
using CastMatrix = void(const void *x, int64_t rows, int64_t columns, const Rotation *rotation, const float *amax,
                        const CastNumbers &numbers, const Output &output, int threads);
CastMatrix cast_float, cast_bf16;
