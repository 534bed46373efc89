// The shards of a batch: their elements in blocks, in float32, whatever format they are kept in.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "floats.h"

// Elements of a chunk; of a block, which stays in the first-level cache; and of a block of FP8, which has one scale.
constexpr int kChunk = 1 << 14, kBlock = 1 << 10, kBlockOfFP8 = 128;

enum Kind : int64_t { kFloat32, kBFloat16, kFloat16, kNothing };
enum Moments : int64_t { kDense, kFP8, kSparse };
enum Rule : int64_t { kNone, kAdaClip, kSpikeClip };

// A shard of a parameter. Dense moments have one row, others the rows of the shard.
struct Shard {
    void *weights;         // where `clipped` writes, too
    const void *gradient;
    void *mean, *mean_square;
    float *mean_scale, *mean_square_scale;  // of FP8: one for each block
    FP16 *master;                           // null without master weights
    int64_t weights_kind, gradient_kind, moments;  // the gradient may be kNothing, which stands for zeros
    int64_t size, row;       // elements of the shard, and of one of its rows
    int64_t columns, every;  // moments of a row, and how many neighbors share one
    int64_t first, stride;   // index of the first moment in the whole parameter, and from one row to the next
    int64_t number;          // of the parameter, for its random bits
};

namespace {

// Calls body(shard, chunk, first, last) for at most size(shard) of the units(shard) of each shard, on several threads.
template <class Units, class Size, class Body>
void for_chunks(int64_t shards, int threads, Units units, Size size, Body body) {
    std::vector<int64_t> ends(shards);
    int64_t chunks = 0;
    for (int64_t i = 0; i < shards; i++) ends[i] = chunks += (units(i) + size(i) - 1) / size(i);
    // A thread takes up to 16 neighbors at a time, and reads on where it was; each has eight turns or more.
    const int64_t turn = std::max<int64_t>(1, std::min<int64_t>(16, chunks / (8 * threads)));
#pragma omp parallel for schedule(dynamic, turn) num_threads(threads) if (chunks > 1)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t i = std::upper_bound(ends.begin(), ends.end(), chunk) - ends.begin();
        int64_t first = (chunk - (i ? ends[i - 1] : 0)) * size(i);
        body(i, chunk, first, std::min(first + size(i), units(i)));
    }
}

// The same with body(shard, first, last, sums), which adds to two sums. Those of a shard's chunks, in their order, are
// result[shard] and result[shards + shard], unless `result` is null.
template <class Units, class Size, class Body>
void sum_chunks(int64_t shards, int threads, Units units, Size size, float *result, Body body) {
    int64_t chunks = 0;
    for (int64_t i = 0; i < shards; i++) chunks += (units(i) + size(i) - 1) / size(i);
    std::vector<double> found(2 * chunks);
    for_chunks(shards, threads, units, size, [&](int64_t i, int64_t chunk, int64_t first, int64_t last) {
        body(i, first, last, &found[2 * chunk]);
    });
    const double *next = found.data();
    for (int64_t i = 0; i < shards && result; i++) {
        double sums[2] = {};
        for (int64_t first = 0; first < units(i); first += size(i), next += 2) sums[0] += next[0], sums[1] += next[1];
        result[i] = (float)sums[0], result[shards + i] = (float)sums[1];
    }
}

// Calls body with a pointer of the type of a kind.
template <class Body>
void of_kind(int64_t kind, const void *data, Body body) {
    if (kind == kFloat32) body((float *)data);
    if (kind == kBFloat16) body((BF16 *)data);
    if (kind == kFloat16) body((FP16 *)data);
}

// How the elements of a shard are cut into blocks: by rows and their moments, or as one long row of elements.
struct Walk {
    int64_t rows, row, columns, every, block, blocks_in_row;

    Walk(const Shard &s, bool by_rows, int64_t block = kBlock)
        : rows(1), row(s.size), columns(s.size), every(1), block(block) {
        if (by_rows && s.size) rows = s.size / s.row, row = s.row, columns = s.columns, every = s.every;
        blocks_in_row = (columns + block - 1) / block;
    }
    int64_t blocks() const { return rows * blocks_in_row; }
    int64_t blocks_in_chunk() const { return kChunk / block; }
};

// Calls body(first, lanes) for a vector of elements at a time.
template <class Body>
INLINE inline void for_lanes(int64_t count, Body body) {
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) body(k, kLanes);
    if (k < count) body(k, (int)(count - k));
}

// Some moments of a row, and the elements that have them: one of `every` neighbors.
struct Block {
    int64_t moment, scale, element;   // in the shard: its first moment, scale of FP8 and element
    int64_t every, left;              // elements from the first one to the end of the row
    uint32_t index;                   // of the first moment in the whole parameter
    int count;

    Block(const Shard &s, const Walk &walk, int64_t number) : every(walk.every) {
        int64_t row = number / walk.blocks_in_row, column = (number - row * walk.blocks_in_row) * walk.block;
        moment = row * walk.columns + column;
        scale = row * ((walk.columns + kBlockOfFP8 - 1) / kBlockOfFP8) + column / kBlockOfFP8;
        element = row * walk.row + column * every;
        left = walk.row - column * every;
        index = (uint32_t)(s.first + row * s.stride + column);
        count = (int)std::min(walk.block, walk.columns - column);
    }
};

// A block in float32: pointers to memory, or to the buffers, which have room for whole vectors.
struct Work {
    float *gradient, *weights;
    alignas(64) float buffers[4][kBlock];
    alignas(64) int32_t picks[kBlock];  // which of its neighbors has the moment
};

U32 random_from(uint32_t index, uint64_t key) {
    return random_bits((U32)kLane + index, (uint32_t)key, (uint32_t)(key >> 32));
}

// Draws which of its neighbors, fewer at the end of a row, has each moment.
void pick(const Block &b, uint64_t key, int32_t *picks) {
    for_lanes(b.count, [=](int64_t k, int lanes) {
        U32 random = random_from(b.index + (uint32_t)k, key);
        F32 neighbors = all((float)b.every);
        if ((k + lanes) * b.every > b.left) neighbors[lanes - 1] = (float)(b.left - (k + lanes - 1) * b.every);
        F32 draw = __builtin_convertvector((I32)(random >> 16), F32) * 0x1p-16f + 0x1p-17f;
        I32 picked = __builtin_convertvector(draw * neighbors, I32);
        memcpy(picks + k, &picked, sizeof picked);
    });
}

inline float load_one(const float *source) { return *source; }
inline void store_one(float *target, float value) { *target = value; }
template <class T>
float load_one(const T *source) {
    return load(source, 1)[0];
}
template <class T>
void store_one(T *target, float value) {
    store(target, all(value), 1);
}

// The elements of a block in float32, in the buffer or where they are.
template <class T>
float *gather(const Block &b, T *source, const int32_t *picks, float *buffer) {
    source += b.element;
    if (b.every > 1) {
        for (int i = 0; i < b.count; i++) buffer[i] = load_one(source + i * b.every + picks[i]);
    } else {
        if (sizeof(T) == sizeof(float)) return (float *)source;
        for_lanes(b.count, [=](int64_t k, int lanes) { store(buffer + k, load(source + k, lanes)); });
    }
    return buffer;
}

template <class T>
void scatter(const Block &b, T *target, const int32_t *picks, const float *buffer) {
    target += b.element;
    if ((const void *)target == buffer) return;
    if (b.every > 1) {
        for (int i = 0; i < b.count; i++) store_one(target + i * b.every + picks[i], buffer[i]);
    } else {
        for_lanes(b.count, [=](int64_t k, int lanes) { store(target + k, load(buffer + k), lanes); });
    }
}

// Calls body(first, count, scale) for what has one scale.
template <class Body>
INLINE inline void for_scales(const Block &b, Body body) {
    for (int first = 0, scale = 0; first < b.count; first += kBlockOfFP8, scale++)
        body(first, std::min(b.count - first, kBlockOfFP8), b.scale + scale);
}

// The mean squares of a block, in the buffer or where they are.
const float *load_squares(const Shard &s, const Block &b, float *buffer) {
    if (s.moments != kFP8) return (float *)s.mean_square + b.moment;
    const uint8_t *codes = (const uint8_t *)s.mean_square + b.moment;
    for_scales(b, [=](int first, int count, int64_t scale) {
        for_lanes(count, [=](int64_t k, int lanes) {
            store(buffer + first + k, decode<E5M2OfSquares>(load_codes(codes + first + k, lanes), s.mean_square_scale[scale]));
        });
    });
    return buffer;
}

// Codes of values that have the same scales. One hash of an element draws for both moments, with a half of its bits each.
inline void encode_moments(const float *means, const float *squares, int count, float mean_scale, float square_scale,
                           uint32_t index, uint64_t key, uint8_t *mean_codes, uint8_t *square_codes) {
    const float mean_unit = mean_scale > 0 ? mean_scale : INFINITY, square_unit = square_scale > 0 ? square_scale : INFINITY;
    U32 indices = (U32)kLane + index;
    for_lanes(count, [&](int64_t k, int lanes) {
        U32 random = random_bits(indices, (uint32_t)key, (uint32_t)(key >> 32));
        store_codes(mean_codes + k, encode<E4M3>(load(means + k) / mean_unit, random), lanes);
        store_codes(square_codes + k, encode<E5M2OfSquares>(load(squares + k) / square_unit, random << 16), lanes);
        indices += kLanes;
    });
}

}  // namespace
