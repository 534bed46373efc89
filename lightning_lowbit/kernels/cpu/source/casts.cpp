// The cast of an operand: blocks, their scales, elements rounded in units of them.
//
// A matrix is cut into rectangles of whole tiles that fit a cache. Within one, the largest magnitudes of its columns are
// reduced over each tile, become scales, and the elements are read again and rounded. Threads share no rectangle, and no
// result depends on their number.

#include <type_traits>
#include <vector>

#include "codes.h"
#include "peaks.h"

// What a call writes: as casts.py declares it.
struct Output {
    void *values;   // [rows, columns] contiguous
    float *factor;  // one per row, one per column, or one; null where there is none
    const int64_t *key;          // of stochastic rounding
    int32_t dtype;               // 0 float, 1 bfloat16, 2 int8, 3 codes
    int32_t all_columns, first;  // random bits belong to element `row * all_columns + column + first`
    Codes codes;                 // of dtype 3
};

namespace {

template <class T>
T *buffer(size_t size, int which) {
    static thread_local std::vector<T> buffers[4];
    if (buffers[which].size() < size + kLanes) buffers[which].resize(size + kLanes);
    return buffers[which].data();
}

// Part of a matrix in whole tiles: one tile high, `columns` wide.
template <class In>
struct Strip {
    const In *x;
    int64_t stride, rows, columns, row, column;

    int count(int64_t at) const { return int(columns - at < kLanes ? columns - at : kLanes); }
};

struct Scales {
    float *encode, *stored;
    int64_t columns_per_entry;  // a multiple of kLanes, or 1
};

// The largest magnitude of each tile of a strip.
template <class In>
void block_peaks(const Strip<In> &strip, int64_t width, int32_t *peaks) {
    if (width == 1) {
        for (int64_t at = 0; at < strip.columns; at += kLanes) {
            I32 peak = peak_of_column(strip.x + at, strip.stride, strip.rows, strip.count(at));
            memcpy(peaks + at, &peak, sizeof peak);
        }
    } else if (width % kLanes == 0) {
        int64_t blocks = (strip.columns + width - 1) / width;
        for (int64_t block = 0; block < blocks; block += kLanes) {
            I32 of_blocks[kLanes] = {};
            int64_t end = (block + kLanes) * width;
            if constexpr (std::is_same<In, BF16>::value) {
                if (end <= strip.columns && strip.rows == 1 && (width == 16 || width == 32)) {
                    const In *x = strip.x + block * width;
                    I32 largest = width == 16 ? largest_of_blocks<8>(x) : largest_of_blocks<16>(x);
                    memcpy(peaks + block, &largest, sizeof largest);
                    continue;
                }
            }
            if (end <= strip.columns) {
                for (int64_t row = 0; row < strip.rows; row++)
                    for (int i = 0; i < kLanes; i++)
                        for (const In *x = strip.x + row * strip.stride + (block + i) * width, *stop = x + width;
                             x < stop; x += kLanes)
                            of_blocks[i] = larger(of_blocks[i], (I32)magnitude(load(x)));
            } else {
                for (int64_t at = block * width; at < strip.columns; at += kLanes) {
                    I32 &of_block = of_blocks[at / width - block];
                    of_block = larger(of_block,
                                      peak_of_column(strip.x + at, strip.stride, strip.rows, strip.count(at)));
                }
            }
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

// Sums over tiles: rows, then columns, each in halves, so that the order is fixed.
void add_halves(float *values, int64_t stride, int64_t count) {
    int64_t half = 1;
    while (half < count) half *= 2;
    for (half /= 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half && i + half < count; i++) values[i * stride] += values[(i + half) * stride];
}

// Replaces the scales of blocks (6) by those of 4 where the error of the whole tile is smaller.
template <class In>
void choose_four(const Strip<In> &strip, int64_t width, const Plan &plan, Level level, float *six, const float *four) {
    int64_t padded = strip.columns + kLanes;
    float *gains = buffer<float>(strip.rows * padded, 3);
    for (int64_t row = 0; row < strip.rows; row++) {
        for (int64_t at = 0; at < strip.columns; at += kLanes) {
            F32 x = load(strip.x + row * strip.stride + at, strip.count(at)), errors[2];
            for (int i = 0; i < 2; i++) {
                F32 scales;
                for (int lane = 0; lane < kLanes; lane++) scales[lane] = (i ? six : four)[(at + lane) / width];
                F32 codes = round_nearest(x * encode_factor(scales, level, plan), plan.element);
                F32 difference = codes * (scales * level.decode) - x;
                errors[i] = plan.four_over_six == kSquared ? difference * difference : magnitude(difference);
            }
            store(gains + row * padded + at, errors[0] - errors[1], strip.count(at));
        }
    }
    for (int64_t at = 0; at < strip.columns; at += width) {
        int64_t columns = strip.columns - at < width ? strip.columns - at : width;
        for (int64_t i = 0; i < columns; i++) add_halves(gains + at + i, padded, strip.rows);
        add_halves(gains + at, 1, columns);
        if (gains[at] < 0.0f) six[at / width] = four[at / width];
    }
}

// Scales of the tiles of a strip from its elements.
template <class In>
Scales scales_of_strip(const Strip<In> &strip, const Plan &plan, Level level) {
    int64_t width = plan.tile_columns ? plan.tile_columns : (strip.columns + kLanes - 1) / kLanes * kLanes;
    int64_t blocks = (strip.columns + width - 1) / width;
    float *encode = buffer<float>(strip.columns + width, 0), *stored = buffer<float>(strip.columns + width, 1);
    block_peaks(strip, width, buffer<int32_t>(blocks, 0));
    float *scales = plan.four_over_six ? stored : encode, *four = encode;
    for (int64_t at = 0; at < blocks; at += kLanes) {
        F32 peaks = load((const float *)buffer<int32_t>(blocks, 0) + at);
        if (plan.four_over_six) {
            F32 wanted = peaks / plan.element.max * level.encode;
            store(scales + at, select_nan(peaks, scale_exmy(wanted, plan)));
            store(four + at, select_nan(peaks, scale_exmy(wanted * 1.5f, plan)));
        } else {
            store(scales + at, scales_of(peaks, level.encode, plan));
        }
    }
    if (plan.four_over_six) choose_four(strip, width, plan, level, scales, four);
    for (int64_t at = 0; at < blocks; at += kLanes) {
        F32 of_blocks = load(scales + at);
        store(encode + at, encode_factor(of_blocks, level, plan));
        store(stored + at, stored_scale(of_blocks, plan));
    }
    if (width == 1 || width % kLanes == 0) return {encode, stored, width};
    for (int64_t column = strip.columns - 1; column >= 0; column--) {  // one entry per column, from the last one
        encode[column] = encode[column / width];
        stored[column] = stored[column / width];
    }
    return {encode, stored, 1};
}

inline void put(int8_t *target, F32 value, int count) {
    I32 whole = __builtin_convertvector(value, I32);
    for (int lane = 0; lane < count; lane++) target[lane] = int8_t(whole[lane]);
}
inline void put(float *target, F32 value, int count) { store(target, value, count); }
inline void put(BF16 *target, F32 value, int count) { store(target, value, count); }

// Constants of the generated code: the bits of a style are stochastic (1), per_block (2), wide (4), exact (8).

template <unsigned kStyle, class In, class Out>
void round_strip(const Strip<In> &strip, const Scales &scales, const Plan &plan, const Output &output) {
    constexpr bool kStochastic = kStyle & 1, kPerBlock = kStyle & 2, kWide = kStyle & 4, kExact = kStyle & 8;
    constexpr bool kCodes = std::is_same<Out, Codes>::value;
    const Grid grid = plan.element;
    const Codes codes = output.codes;
    const bool is_tensor = plan.statistic != kBlockMax, through = plan.through_bf16;
    const int64_t columns = strip.columns, per_entry = scales.columns_per_entry;
    uint32_t low = 0, high = 0;
    if (kStochastic) low = uint32_t(*output.key), high = uint32_t(*output.key >> 32);
    U32 lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    for (int64_t row = 0; row < strip.rows; row++) {
        const In *x = strip.x + row * strip.stride;
        const int64_t start = (strip.row + row) * strip.stride + strip.column;
        Out *values = kCodes ? nullptr : (Out *)output.values + start;
        U32 index = lane + (uint32_t(strip.row + row) * uint32_t(output.all_columns) +
                            uint32_t(strip.column + output.first));
        auto cast = [&](F32 value, F32 encode, F32 stored, int64_t at) __attribute__((always_inline)) {
            if (!kPerBlock && is_tensor) value = value + (value - value);  // infinities become NaN
            value = value * encode;
            value = kStochastic ? round_stochastic(value, grid, random_bits(index + uint32_t(at), low, high))
                                : round_nearest(value, grid);
            if (kCodes) return value;
            if (kPerBlock) value = value * stored;
            return through ? widen(narrow(value)) : value;
        };
        auto cast_whole = [&](int64_t at, F32 encode, F32 stored) __attribute__((always_inline)) {
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
            for (; at < whole; at += kLanes) cast_whole(at, load(scales.encode + at), load(scales.stored + at));
        else if (per_entry == kLanes)
            for (; at < whole; at += kLanes)
                cast_whole(at, all(scales.encode[at / kLanes]), all(scales.stored[at / kLanes]));
        else
            for (int64_t entry = 0; at < whole; entry++)
                for (int64_t end = at + per_entry < whole ? at + per_entry : whole; at < end; at += kLanes)
                    cast_whole(at, all(scales.encode[entry]), all(scales.stored[entry]));
        if (int count = int(columns - at)) {
            F32 encode = kWide ? all(scales.encode[at / per_entry]) : load(scales.encode + at);
            F32 stored = kWide ? all(scales.stored[at / per_entry]) : load(scales.stored + at);
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
void put_scales(const Strip<In> &strip, const Scales &scales, const Plan &plan, const Codes &codes) {
    const int64_t width = plan.tile_columns ? plan.tile_columns : strip.stride;
    const int64_t across = (strip.stride + width - 1) / width, blocks = (strip.columns + width - 1) / width;
    const int64_t first = (plan.tile_rows ? strip.row / plan.tile_rows * across : 0) + strip.column / width;
    if (scales.columns_per_entry == width && codes.scale_coding == kUnsigned) {
        for (int64_t at = 0; at < blocks; at += kLanes)
            store_codes(codes.scales + first + at, code_of_magnitude(load(scales.stored + at), plan.scale),
                        int(blocks - at < kLanes ? blocks - at : kLanes));
        return;
    }
    for (int64_t block = 0; block < blocks; block++)
        put_scale(codes, first + block, scales.stored[block * width / scales.columns_per_entry], plan.scale);
}

template <class In, class Out>
void cast_strip(const Strip<In> &strip, const Plan &plan, const Output &output, Level level, const Scales *of_tensor) {
    Scales scales = of_tensor ? *of_tensor : scales_of_strip(strip, plan, level);
    using Round = void (*)(const Strip<In> &, const Scales &, const Plan &, const Output &);
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
    unsigned style = (plan.stochastic ? 1 : 0) + (plan.per_block ? 2 : 0) + (scales.columns_per_entry != 1 ? 4 : 0) +
                     (plan.exact ? 8 : 0);
    rounds[style](strip, scales, plan, output);
    if (std::is_same<Out, Codes>::value) {
        if (!of_tensor) put_scales(strip, scales, plan, output.codes);
        return;
    }
    if (plan.per_block || of_tensor) return;
    if (plan.tile_rows == 0)
        for (int64_t i = 0; i < strip.columns; i++) output.factor[strip.column + i] = scales.stored[i] * level.decode;
    else
        output.factor[strip.row] = scales.stored[0] * level.decode;
}

template <class In>
void cast_all(const In *x, int64_t rows, int64_t columns, const float *amax, const Plan &plan, const Output &output,
              int threads) {
    const bool is_tensor = plan.statistic != kBlockMax;
    float peak = amax ? *amax : 0.0f;
    if (amax == nullptr && (plan.two_level || plan.statistic == kTensorMax)) peak = amax_of(x, rows * columns, threads);
    Level level = level_of(peak, plan);
    float encode = 1.0f, stored = 1.0f;
    if (is_tensor) {
        float statistic = plan.statistic == kTensorMax ? peak : mean_of(x, rows, columns, threads);
        F32 scales = scales_of(all(statistic), level.encode, plan);
        encode = encode_factor(scales, level, plan)[0], stored = stored_scale(scales, plan)[0];
    }
    const Scales of_tensor = {&encode, &stored, (columns + kLanes) * kLanes};
    if (output.factor && (is_tensor || plan.per_block || output.dtype == 3)) *output.factor = stored * level.decode;

    // Rectangles of whole tiles: strips of one tile each, some rows of strips that are one row high.
    int64_t tile_rows = is_tensor ? 8 : plan.tile_rows ? plan.tile_rows : rows, height = tile_rows > 1 ? tile_rows : 8;
    int64_t width = tile_rows > 64 ? 64 : kPanel, side = is_tensor ? 1 : plan.tile_columns ? plan.tile_columns : columns;
    width = (width + side - 1) / side * side;
    int64_t down = (rows + height - 1) / height, across = (columns + width - 1) / width;
    auto cast = output.dtype == 0   ? cast_strip<In, float>
                : output.dtype == 1 ? cast_strip<In, BF16>
                : output.dtype == 2 ? cast_strip<In, int8_t>
                                    : cast_strip<In, Codes>;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * columns > 8192)
    for (int64_t part = 0; part < down * across; part++) {
        int64_t left = part % across * width, top = part / across * height;
        int64_t bottom = top + height < rows ? top + height : rows;
        for (int64_t row = top; row < bottom; row += tile_rows) {
            Strip<In> strip = {x + row * columns + left, columns, row + tile_rows < bottom ? tile_rows : bottom - row,
                               left + width < columns ? width : columns - left, row, left};
            cast(strip, plan, output, level, is_tensor ? &of_tensor : nullptr);
        }
    }
}

}  // namespace

// Casts a contiguous matrix [rows, columns], float where `dtype` is 0 and bfloat16 where it is 1. `amax` may be null.
EXPORT void lowbit_cast(const void *x, int32_t dtype, int64_t rows, int64_t columns, const float *amax,
                        const Plan *plan, const Output *output, int32_t threads) {
    if (dtype == 0)
        cast_all((const float *)x, rows, columns, amax, *plan, *output, threads);
    else
        cast_all((const BF16 *)x, rows, columns, amax, *plan, *output, threads);
}

// The largest magnitude of `count` contiguous elements; infinite or NaN if one of them is.
EXPORT void lowbit_amax(const void *x, int32_t dtype, int64_t count, float *result, int32_t threads) {
    *result = dtype == 0 ? amax_of((const float *)x, count, threads) : amax_of((const BF16 *)x, count, threads);
}
