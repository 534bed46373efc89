// Tiles of a GEMM of codes: some rows of the left operand by some panels of the right one, whose sums fit the registers.
#pragma once

#include <algorithm>

#include "dots.h"

namespace {

// Vectors of a panel's rows; rows and panels of a tile.
constexpr int kVectors = kRows / kLanes;
constexpr int kTileRows = kLanes == 8 ? 8 : 4, kTilePanels = kLanes == 16 ? 2 : 1;

// Added to the bits of this number, whose last digit is 1, an integer gives the float that is larger by it. A fused
// multiplication by a scale takes kShift * scale off again: the rounding is that of integer * scale, where kShift * scale is
// exact. Scales of single groups are tried for that (Path), since they come most often.
constexpr float kShift = 12582912.0f;
template <int kStep>
constexpr bool kIsShifted = kStep == 1 && kHasFusedMultiplyAdd;

// Where no scales are, they are 1.
struct ScaleReader {
    const float *scales;
    int64_t groups;  // of a scale

    template <int kStep>
    const float *at(int64_t group) const {
        static const float ones[kRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
        if (kStep) return scales + group / kStep * kRows;
        return scales ? scales + group / groups * kRows : ones;
    }
};

// The first panel of an operand from a group of k on, or from one of its rows on; other panels are strides away.
struct Reader {
    const int8_t *codes;
    ScaleReader scales;
    int64_t code_stride, scale_stride;

    Reader() = default;
    Reader(const Panels &panels, int64_t group)
        : codes(panels.codes + group * kRows * kGroup),
          scales{panels.block ? panels.scales + group * kGroup / panels.block * kRows : nullptr, panels.block / kGroup},
          code_stride(panels.groups() * kRows * kGroup), scale_stride(panels.blocks() * kRows) {}
    Reader from(uint64_t row) const {
        Reader reader = *this;
        reader.codes += row / kRows * code_stride + row % kRows * kWords;
        if (scales.scales) reader.scales.scales += row / kRows * scale_stride + row % kRows;
        return reader;
    }
};

// Some panels of the right operand, vector by vector, and what the offset of the left one adds to the sums of each block,
// negated, in the place of its first group.
template <int kPanels>
struct Columns {
    static constexpr int kCount = kPanels * kVectors;
    Reader panels[kPanels];
    const int32_t *starts[kPanels];

    Columns(const Panels &operand, const int32_t *all_starts, int64_t panel, int64_t group) {
        for (int i = 0; i < kPanels; i++) {
            panels[i] = Reader(operand, group).from((panel + i) * kRows);
            starts[i] = all_starts + ((panel + i) * operand.groups() + group) * kRows;
        }
    }
    S8 words(int64_t group, int i, int column) const {
        return read<S8>(panels[column / kVectors].codes + (group * kWords + i) * kWordStride + column % kVectors * kLanes * kWords);
    }
    template <int kStep>
    I32 start(int64_t group, int column) const {
        const I32 shift = kIsShifted<kStep> ? (I32)bits(all(kShift)) : I32{};
        if (!kHasOffset) return shift;
        return read<I32>(starts[column / kVectors] + group * kRows + column % kVectors * kLanes) + shift;
    }
    template <int kStep>
    F32 scale(int64_t group, int column) const {
        return load(panels[column / kVectors].scales.template at<kStep>(group) + column % kVectors * kLanes);
    }
};

// The rows of a tile, neighbors in a panel.
struct Neighbors {
    Reader first;

    S8 word(int row, int64_t group, int i) const {
        return repeat_word(first.codes + row * kWords + (group * kWords + i) * kWordStride);
    }
    template <int kStep>
    float scale(int row, int64_t group) const {
        return first.scales.at<kStep>(group)[row];
    }
};

// The same of rows that lie anywhere.
struct Scattered {
    const int8_t *codes[kTileRows];
    ScaleReader scales[kTileRows];

    S8 word(int row, int64_t group, int i) const { return repeat_word(codes[row] + (group * kWords + i) * kWordStride); }
    template <int kStep>
    float scale(int row, int64_t group) const {
        return *scales[row].at<kStep>(group);
    }
};

// Products of a block as float, times the scale of the right operand.
template <int kStep>
inline F32 scaled(I32 products, F32 scale, F32 shift) {
    return kIsShifted<kStep> ? fused_multiply_add((F32)products, scale, shift) : __builtin_convertvector(products, F32) * scale;
}

// Keeps a vector that is used several times in a register; left alone, GCC reads it from memory each time.
inline F32 in_register(F32 value) {
#if defined(__AVX512BW__)
    asm("" : "+v"(value));
#endif
    return value;
}

// Calls body(row, column) for the vectors of some rows. Unrolled early: else GCC keeps sums in memory.
template <int kCount, int kColumns, class Body>
INLINE inline void for_sums(Body body) {
#pragma GCC unroll 8
    for (int row = 0; row < kCount; row++)
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; column++) body(row, column);
}

// Rows of a tile that are summed at a time, whose dots share the right words in registers; where scales come often, one.
template <int kStep>
constexpr int kRowsAtOnce = kStep == 1 || kStep == 2 ? 1 : 4;
constexpr int64_t kGroupsAtOnce = 32;  // of the right operand, which stay in a cache for all rows of a tile

// Adds the products of some groups and rows to sums of integers.
template <int kCount, class Rows, class Right, int kColumns = Right::kCount>
INLINE inline void add_products(const Rows &left, const Right &right, int row, int64_t first, int64_t end,
                                I32 (&products)[kCount][kColumns]) {
    Dots dots[kCount][kColumns];
    for_sums<kCount, kColumns>([&](int r, int c) INLINE { dots[r][c] = begin_dots(products[r][c]); });
#pragma GCC unroll 2
    for (int64_t group = first; group < end; group++)
#pragma GCC unroll 8
        for (int i = 0; i < kWords; i++)
            for_sums<kCount, kColumns>([&](int r, int c) INLINE {
                dots[r][c] = add_dots(dots[r][c], left.word(row + r, group, i), right.words(group, i, c));
            });
    for_sums<kCount, kColumns>([&](int r, int c) INLINE { products[r][c] = end_dots(dots[r][c], products[r][c]); });
}

// Adds the products of the groups up to `end`, which share scales: kStep of them, unless it is 0. Then dots hold those of
// `most` groups, and all rows take these before the next ones, while a cache has them.
template <int kStep, class Rows, class Right, int kColumns = Right::kCount>
INLINE inline void add_block(const Rows &left, const Right &right, int64_t first, int64_t end, int64_t most,
                             F32 (&sums)[kTileRows][kColumns]) {
    constexpr int kCount = kRowsAtOnce<kStep>, kParts = kTileRows / kCount;
    F32 scales[kColumns], shifts[kColumns];
    I32 starts[kColumns], products[kParts][kCount][kColumns];
    for_sums<1, kColumns>([&](int, int c) INLINE {
        scales[c] = in_register(right.template scale<kStep>(first, c));
        shifts[c] = in_register(scales[c] * -kShift);
        starts[c] = right.template start<kStep>(first, c);
    });
    auto begin = [&](int part) INLINE {
        for_sums<kCount, kColumns>([&](int r, int c) INLINE { products[part][r][c] = starts[c]; });
    };
    auto finish = [&](int part) INLINE {
        for_sums<kCount, kColumns>([&](int r, int c) INLINE {
            const int row = part * kCount + r;
            const float scale = left.template scale<kStep>(row, first);
            const F32 product = scaled<kStep>(products[part][r][c], scales[c], shifts[c]);
            sums[row][c] = fused_multiply_add(product, all(scale), sums[row][c]);
        });
    };
    if constexpr (kStep > 0) {
#pragma GCC unroll 8
        for (int part = 0; part < kParts; part++) {
            begin(part);
            add_products(left, right, part * kCount, first, end, products[part]);
            finish(part);
        }
        return;
    }
    for_sums<kParts, 1>([&](int part, int) INLINE { begin(part); });
    for (int64_t group = first; group < end; group += most)
        for_sums<kParts, 1>([&](int part, int) INLINE {
            add_products(left, right, part * kCount, group, std::min(group + most, end), products[part]);
        });
    for_sums<kParts, 1>([&](int part, int) INLINE { finish(part); });
}

// Adds the products of some groups to the sums of a tile, which begin at 0 unless it continues. `step` groups share scales:
// kStep, and of both operands, unless it is 0. Not inlined, and with copies of its arguments: else GCC keeps sums in memory.
template <int kStep, class Rows, class Right, int kColumns = Right::kCount>
__attribute__((noinline)) void add_groups(const Rows &rows, const Right &columns, int64_t groups, int64_t step, int64_t most,
                                          bool continues, F32 (&result)[kTileRows][kColumns]) {
    const Rows left = rows;
    const Right right = columns;
    F32 sums[kTileRows][kColumns] = {};  // in registers
    if (continues) for_sums<kTileRows, kColumns>([&](int r, int c) INLINE { sums[r][c] = result[r][c]; });
    if (kStep) step = kStep;
    for (int64_t first = 0; first < groups; first += step)
        add_block<kStep>(left, right, first, kStep ? first + kStep : std::min(first + step, groups), most, sums);
    for_sums<kTileRows, kColumns>([&](int r, int c) INLINE { result[r][c] = sums[r][c]; });
}

// What an offset of the left operand adds to the sums of each row of the right one, negated: of blocks of `step` groups from
// the start of each slice of k on, in the place of the first group.
void offsets_of(const Panels &panels, int32_t offset, int64_t step, int64_t slice, int32_t *starts, int threads) {
    const int64_t groups = panels.groups(), slices = (groups + slice - 1) / slice, parts = panels.panels() * slices;
    const S8 ones = S8{} + 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && panels.panels() * groups > 512)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t panel = part / slices * groups, begin = part % slices * slice, end = std::min(begin + slice, groups);
        for (int64_t first = begin; first < end; first += step)
            for (int row = 0; row < kRows; row += kLanes) {
                I32 sums = {};
                for (int64_t group = first; group < std::min(first + step, end); group++) {
                    const int8_t *codes = panels.codes + (panel + group) * kRows * kGroup + row * kWords;
                    Dots dots = begin_dots(sums);
                    for (int i = 0; i < kWords; i++) dots = add_dots(dots, ones, read<S8>(codes + i * kWordStride));
                    sums = end_dots(dots, sums);
                }
                sums *= -offset;
                memcpy(starts + (panel + first) * kRows + row, &sums, sizeof sums);
            }
    }
}

}  // namespace
