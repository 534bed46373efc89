// Tiles of a GEMM of codes: some rows of the left operand by some panels of the right one, whose sums fit the registers.
#pragma once

#include <algorithm>

#include "dots.h"

namespace {

// Vectors of a panel's rows; rows and panels of a tile.
constexpr int kVectors = kRows / kLanes;
constexpr int kTileRows = kLanes == 8 ? 8 : 4, kTilePanels = kLanes == 16 ? 2 : 1;

// Where no scales are, they are 1.
struct ScaleReader {
    const float *scales;
    int64_t groups;  // of a scale

    template <bool kSingle>
    const float *at(int64_t group) const {
        static const float ones[kRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
        if (kSingle) return scales + group * kRows;
        return scales ? scales + group / groups * kRows : ones;
    }
};

// One operand in panels from a panel, and a group of k, on; from a row of the panel on, where it is shifted.
struct Reader {
    const int8_t *codes;
    ScaleReader scales;

    Reader(const Panels &panels, int64_t panel, int64_t group = 0)
        : codes(panels.codes + (panel * panels.groups() + group) * kRows * kGroup),
          scales{panels.block ? panels.scales + (panel * panels.blocks() + group * kGroup / panels.block) * kRows : nullptr,
                 panels.block / kGroup} {}
    Reader shifted(int64_t row) const {
        Reader reader = *this;
        reader.codes += row * kWords;
        if (scales.scales) reader.scales.scales += row;
        return reader;
    }
};

// The rows of a tile, neighbors in a panel, and what the offset of the right operand adds to their sums, negated.
struct Neighbors {
    Reader first;
    const int32_t *starts;

    const int8_t *codes(int row) const { return first.codes + row * kWords; }
    int32_t start(int row, int64_t group) const { return starts[group * kRows + row]; }
    template <bool kSingle>
    float scale(int row, int64_t group) const {
        return first.scales.at<kSingle>(group)[row];
    }
};

// The same of rows that lie anywhere.
struct Scattered {
    const int8_t *words[kTileRows];
    const int32_t *starts[kTileRows];
    ScaleReader scales[kTileRows];

    const int8_t *codes(int row) const { return words[row]; }
    int32_t start(int row, int64_t group) const { return starts[row][group * kRows]; }
    template <bool kSingle>
    float scale(int row, int64_t group) const {
        return *scales[row].at<kSingle>(group);
    }
};

// What the products of a block add to a sum.
inline F32 scaled(I32 products, F32 right, float left, F32 sum) {
    return fused_multiply_add(__builtin_convertvector(products, F32) * right, all(left), sum);
}

// Keeps a vector that is used several times in a register; left alone, GCC reads it from memory each time.
inline F32 in_register(F32 value) {
#if defined(__AVX512BW__)
    asm("" : "+v"(value));
#endif
    return value;
}

// Adds the products of some groups to the sums of a tile, which begin at 0 unless it continues. `step` groups share scales:
// one, of both operands, where kSingle. Not inlined, and with loops unrolled early: else GCC keeps sums in memory.
template <int kPanels, bool kSingle, class Rows>
__attribute__((noinline)) void add_groups(const Rows &left, const Reader *right, int64_t groups, int64_t step,
                                          bool continues, F32 (&result)[kTileRows][kPanels * kVectors]) {
    constexpr int kColumns = kPanels * kVectors;
    F32 sums[kTileRows][kColumns] = {};  // in registers
    I32 whole[kTileRows][kColumns] = {};
    if (continues)
#pragma GCC unroll 8
        for (int r = 0; r < kTileRows; r++)
#pragma GCC unroll 8
            for (int column = 0; column < kColumns; column++) sums[r][column] = result[r][column];
    for (int64_t first = 0; first < groups; first += kSingle ? 1 : step) {
        const int64_t end = kSingle ? first + 1 : std::min(first + step, groups);
        F32 scales[kColumns];
        for (int column = 0; column < kColumns; column++) {
            const ScaleReader &reader = right[column / kVectors].scales;
            scales[column] = in_register(load(reader.at<kSingle>(first) + column % kVectors * kLanes));
        }
#pragma GCC unroll 2
        for (int64_t group = first; group < end; group++) {
            S8 words[kColumns][kWords];
            for (int column = 0; column < kColumns; column++)
                for (int i = 0; i < kWords; i++)
                    words[column][i] = read<S8>(right[column / kVectors].codes + (group * kWords + i) * kWordStride +
                                                  column % kVectors * kLanes * kWords);
            for (int r = 0; r < kTileRows; r++) {
                S8 repeated[kWords];
                for (int i = 0; i < kWords; i++) repeated[i] = repeat_word(left.codes(r) + (group * kWords + i) * kWordStride);
                const I32 start = all_integers(left.start(r, group));
                for (int column = 0; column < kColumns; column++) {
                    const I32 sum = add_dots(kSingle ? start : whole[r][column] + start, repeated, words[column]);
                    if (kSingle)
                        sums[r][column] = scaled(sum, scales[column], left.template scale<true>(r, first), sums[r][column]);
                    else
                        whole[r][column] = sum;
                }
            }
        }
        for (int r = 0; !kSingle && r < kTileRows; r++)
            for (int column = 0; column < kColumns; column++) {
                const float scale = left.template scale<false>(r, first);
                sums[r][column] = scaled(whole[r][column], scales[column], scale, sums[r][column]);
                whole[r][column] = I32{};
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; r++)
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; column++) result[r][column] = sums[r][column];
}

// What the offset of the right operand adds to the sums of each group and row, negated.
void offsets_of(const Panels &panels, int32_t *starts, int threads) {
    const int64_t groups = panels.groups() * panels.panels();
    const S8 ones[kWords] = {S8{} + 1, S8{} + 1, S8{} + 1, S8{} + 1};
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && groups > 512)
    for (int64_t group = 0; group < groups; group++)
        for (int row = 0; row < kRows; row += kLanes) {
            S8 words[kWords];
            for (int i = 0; i < kWords; i++)
                words[i] = read<S8>(panels.codes + (group * kWords + i) * kWordStride + row * kWords);
            I32 sums = add_dots(I32{}, words, ones) * -kOffset;
            memcpy(starts + group * kRows + row, &sums, sizeof sums);
        }
}

}  // namespace
