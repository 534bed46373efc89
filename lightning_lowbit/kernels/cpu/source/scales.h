// Scales of blocks: from their largest magnitudes, by 4/6, or corrected in groups.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "rotation.h"
#include "rounding.h"

namespace {

// Part of a matrix in whole tiles: one tile high, `columns` wide. In memory its rows begin `stride` apart.
template <class In>
struct Strip {
    const In *x;
    int64_t stride, rows, columns, row, column, matrix_columns;

    int count(int64_t at) const { return int(columns - at < kLanes ? columns - at : kLanes); }

    // Of tiles over each other, those that begin `top` rows below.
    Strip part(int64_t top, int64_t height) const {
        return {x + top * stride, stride, rows - top < height ? rows - top : height, columns, row + top, column,
                matrix_columns};
    }
};

// The second level of a strip: of all its elements, or one for each column or row.
struct Levels {
    const float *encode, *decode;
    bool per_column, per_row;

    // Of the part of a strip that begins `top` rows below.
    Levels part(int64_t top) const {
        const int64_t place = per_row ? top : 0;
        return {encode + place, decode + place, per_column, per_row};
    }

    Level at(int64_t column) const {
        if (per_column) return {load(encode + column), load(decode + column)};
        return {all(*encode), all(*decode)};
    }
};

// Random numbers of scales, of 16 bits, belong to the first element of a block.
struct Draws {
    uint32_t low, high;
    int32_t all_columns, first;

    U32 at(int64_t row, int64_t column, int64_t step) const {
        U32 index = (U32)kLane * uint32_t(step);
        return random_bits(index + (uint32_t(row) * uint32_t(all_columns) + uint32_t(column + first)), low, high) >> 16;
    }
};

// Entries of blocks in `columns_per_entry` columns each: what elements are multiplied by, and what they decode with. Those of
// the next `rows_per_entry` rows begin `stride` further.
struct Scales {
    float *encode, *stored;
    int64_t columns_per_entry;  // a multiple of kLanes, or 1
    int64_t rows_per_entry = 1, stride = 0;

    int64_t place(int64_t row) const { return stride ? row / rows_per_entry * stride : 0; }
};

// The largest magnitudes of some columns of a strip, in the lanes of a register.
template <class In>
inline I32 peak_of_part(const Strip<In> &strip, int64_t begin, int64_t end) {
    I32 peak = {};
    for (int64_t row = 0; row < strip.rows; row++) {
        const In *x = strip.x + row * strip.stride;
        int64_t at = begin;
        for (; at + kLanes <= end; at += kLanes) peak = larger(peak, (I32)magnitude(load(x + at)));
        if (at < end) peak = larger(peak, (I32)magnitude(load(x + at, int(end - at))));
    }
    return peak;
}

// The largest magnitude of each tile of a strip.
template <class In>
void block_peaks(const Strip<In> &strip, int64_t width, int32_t *peaks) {
    if (width == 1) {
        largest_of_columns(strip.x, strip.stride, strip.rows, strip.columns, peaks);
    } else if (strip.rows == 1 && strip.columns <= width) {
        *peaks = peak_of(strip.x, strip.columns);
    } else if (width % kLanes == 0) {
        int64_t blocks = (strip.columns + width - 1) / width;
        for (int64_t block = 0; block < blocks; block += kLanes) {
            int64_t end = (block + kLanes) * width;
            if (end <= strip.columns && strip.rows == 1 && (width == 16 || width == 32)) {
                const In *x = strip.x + block * width;
                I32 largest = width == 16 ? largest_of_blocks<16>(x) : largest_of_blocks<32>(x);
                memcpy(peaks + block, &largest, sizeof largest);
                continue;
            }
            I32 of_blocks[kLanes] = {};
            for (int64_t i = 0, begin = block * width; i < kLanes && begin < strip.columns; i++, begin += width)
                of_blocks[i] = peak_of_part(strip, begin, std::min(begin + width, strip.columns));
            I32 largest = largest_lanes(of_blocks);
            memcpy(peaks + block, &largest, sizeof largest);
        }
    } else {
        for (int64_t column = 0; column < strip.columns; column++) {
            I32 peak = peak_of_column(strip.x + column, strip.stride, strip.rows, 1);
            int32_t &of_block = peaks[column / width];
            of_block = column % width == 0 || peak[0] > of_block ? peak[0] : of_block;
        }
    }
}

// The entries of the columns from one on.
inline F32 entries_at(const float *entries, int64_t at, int64_t width) {
    if (width == 1) return load(entries + at);
    if (width % kLanes == 0) return all(entries[at / width]);
    F32 result;
    for (int lane = 0; lane < kLanes; lane++) result[lane] = entries[(at + lane) / width];
    return result;
}

// Adds rows to the first one, in halves, so that the order is fixed.
void add_halves(float *values, int64_t stride, int64_t rows, int64_t columns) {
    int64_t half = 1;
    while (half < rows) half *= 2;
    for (half /= 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half && i + half < rows; i++)
            for (int64_t column = 0; column < columns; column++)
                values[i * stride + column] += values[(i + half) * stride + column];
}

// Sums over each tile of a term of its elements, for all tiles of a strip.
template <class In, class Term>
void sum_tiles(const Strip<In> &strip, int64_t width, float *sums, Term term) {
    int64_t padded = strip.columns + kLanes;
    float *terms = buffer<float>(strip.rows * padded, 2);
    for (int64_t row = 0; row < strip.rows; row++)
        for (int64_t at = 0; at < strip.columns; at += kLanes)
            store(terms + row * padded + at, term(load(strip.x + row * strip.stride + at, strip.count(at)), at));
    add_halves(terms, padded, strip.rows, strip.columns);
    for (int64_t at = 0; at < strip.columns; at += width) {
        add_halves(terms + at, 1, strip.columns - at < width ? strip.columns - at : width, 1);
        sums[at / width] = terms[at];
    }
}

// Replaces the scales of blocks (6) by those of 4 where the error of the whole tile is smaller.
template <class In>
void choose_four(const Strip<In> &strip, int64_t width, const CastNumbers &numbers, const Levels &levels, float *six,
                 const float *four) {
    int64_t blocks = (strip.columns + width - 1) / width;
    float *gains = buffer<float>(blocks, 3);
    sum_tiles(strip, width, gains, [&](F32 x, int64_t at) {
        Level level = levels.at(at);
        F32 errors[2];
        for (int i = 0; i < 2; i++) {
            F32 scales = entries_at(i ? six : four, at, width);
            F32 codes = round_nearest(x * encode_factor(scales, level, numbers), numbers.element);
            F32 difference = codes * (scales * level.decode) - x;
            errors[i] = numbers.four_over_six == kSquared ? difference * difference : magnitude(difference);
        }
        return errors[0] - errors[1];
    });
    for (int64_t block = 0; block < blocks; block++)
        if (gains[block] < 0.0f) six[block] = four[block];
}

// Tiles of a strip: `count` over each other, of so many rows and columns. Entries of those next to each other lie together,
// those of the next ones `stride` further. Where a tile is as wide as the strip, entries may be made for many of them at once.
struct Tiles {
    int64_t rows, columns, count, across;
    bool is_column;
    int64_t stride;

    template <class In>
    Tiles(const Strip<In> &strip, const CastNumbers &numbers)
        : rows(numbers.tile_rows ? numbers.tile_rows : strip.rows),
          columns(numbers.tile_columns ? numbers.tile_columns : (strip.columns + 15) / 16 * 16),
          count((strip.rows + rows - 1) / rows), across((strip.columns + columns - 1) / columns),
          is_column(across == 1 && columns % kLanes == 0 && numbers.two_level != kOfRows && !numbers.four_over_six &&
                    !numbers.stochastic_scales && !numbers.correction),
          stride(is_column ? 1 : ((columns % kLanes ? strip.columns : across) + 15) / 16 * 16) {}

    int64_t entries() const { return count * stride + kLanes; }
};

// Entries of the tiles of a strip, one for each, in `encode` and `stored`.
template <class In>
void scales_of_tiles(const Strip<In> &strip, const Tiles &tiles, const CastNumbers numbers, const Levels &levels,
                     const Draws &draws, float *encode, float *stored) {
    const int64_t width = tiles.columns, count = tiles.is_column ? 1 : tiles.count;
    const int64_t across = tiles.is_column ? tiles.count : tiles.across;
    int32_t *peaks = buffer<int32_t>(tiles.entries(), 0);
    for (int64_t i = 0; i < tiles.count; i++)
        block_peaks(strip.part(i * tiles.rows, tiles.rows), width, peaks + i * tiles.stride);
    for (int64_t i = 0; i < count; i++) {
        const Levels of_part = levels.part(i * tiles.rows);
        float *six = stored + i * tiles.stride, *four = encode + i * tiles.stride;
        for (int64_t at = 0; at < across; at += kLanes) {
            F32 of_blocks = load((const float *)peaks + i * tiles.stride + at), encode_scale = of_part.at(at).encode;
            if (numbers.four_over_six) {
                F32 wanted = of_blocks * numbers.factor / numbers.element.max * encode_scale;
                store(six + at, select_nan(of_blocks, scale_exmy(wanted, numbers)));
                store(four + at, select_nan(of_blocks, scale_exmy(wanted * 1.5f, numbers)));
            } else if (numbers.stochastic_scales && !numbers.correction) {
                U32 random = draws.at(strip.row + i * tiles.rows, strip.column + at * width, width);
                store(six + at, scales_of(of_blocks, encode_scale, numbers, &random));
            } else {
                store(six + at, scales_of(of_blocks, encode_scale, numbers, nullptr));
            }
        }
        if (numbers.four_over_six)
            choose_four(strip.part(i * tiles.rows, tiles.rows), width, numbers, of_part, six, four);
        for (int64_t at = 0; at < across; at += kLanes) {
            F32 of_blocks = load(six + at);
            if (numbers.correction) of_blocks = of_blocks == 0.0f ? all(1.0f) : of_blocks;
            store(four + at, encode_factor(of_blocks, of_part.at(at), numbers));
            store(six + at, stored_scale(of_blocks, numbers));
        }
    }
}

// Corrects what elements decode with, so that the errors of a group of blocks cancel: of neighbors, or of all tiles over each
// other where they are one column wide.
template <class In>
void correct(const Strip<In> &strip, const Tiles &tiles, const CastNumbers &numbers, const Draws &draws,
             const float *encode, float *stored) {
    const int64_t count = tiles.count, width = tiles.columns, blocks = tiles.across, stride = tiles.stride;
    const int64_t along = width == 1 ? 1 : numbers.correction / width;
    float *norms = buffer<float>(count * stride, 3), *products = buffer<float>(count * stride, 4);
    for (int64_t i = 0; i < count; i++) {
        const float *of_encode = encode + i * stride, *of_stored = stored + i * stride;
        auto terms = [&](bool coded) {
            return [=, &numbers](F32 x, int64_t at) {
                F32 y = x * entries_at(of_encode, at, width), scales = entries_at(of_stored, at, width);
                return y * (coded ? round_nearest(y, numbers.element) : y) * (scales * scales);
            };
        };
        Strip<In> part = strip.part(i * tiles.rows, tiles.rows);
        sum_tiles(part, width, norms + i * stride, terms(false));
        sum_tiles(part, width, products + i * stride, terms(true));
    }
    for (float *sums : {norms, products}) {
        if (width == 1) add_halves(sums, stride, count, blocks);
        for (int64_t i = 0; along > 1 && i < count; i++)
            for (int64_t at = 0; at < blocks; at += along) {
                float *group = sums + i * stride + at;
                const int64_t size = along < blocks - at ? along : blocks - at;
                add_halves(group, 1, size, 1);
                for (int64_t block = 1; block < size; block++) group[block] = *group;
            }
    }
    for (int64_t i = 0; i < count; i++) {
        for (int64_t at = 0; at < blocks; at += kLanes) {
            const int64_t group = (width == 1 ? 0 : i * stride) + at;
            F32 product = load(products + group);
            F32 factor = product == 0.0f ? all(1.0f) : load(norms + group) / product;
            U32 random = draws.at(strip.row + i * tiles.rows, strip.column + at * width, width);
            F32 wanted = load(stored + i * stride + at) * factor;
            store(stored + i * stride + at, round_stochastic(wanted, numbers.scale, random));
        }
    }
}

// Makes entries of tiles those of columns, unless tiles are as wide as vectors, or one column.
inline void spread(float *encode, float *stored, int64_t columns, int64_t width) {
    if (width == 1 || width % kLanes == 0) return;
    for (int64_t column = columns - 1; column >= 0; column--) {
        encode[column] = encode[column / width];
        stored[column] = stored[column / width];
    }
}

}  // namespace
