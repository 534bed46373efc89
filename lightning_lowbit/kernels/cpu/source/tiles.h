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

    template <int kStep>
    const float *at(int64_t group) const {
        static const float ones[kRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
        if (kStep) return scales + group / kStep * kRows;
        return scales ? scales + group / groups * kRows : ones;
    }
};

// One operand in panels from a panel, and a group of k, on; from a row of the panel on, where it is shifted.
struct Reader {
    const int8_t *codes;
    ScaleReader scales;

    Reader() = default;
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

// Some panels of the right operand, vector by vector, and what the offset of the left one adds to the sums of each group,
// negated.
template <int kPanels>
struct Columns {
    static constexpr int kCount = kPanels * kVectors;
    Reader panels[kPanels];
    const int32_t *starts[kPanels];

    Columns(const Panels &operand, const int32_t *all_starts, int64_t panel, int64_t group) {
        for (int i = 0; i < kPanels; i++) {
            panels[i] = Reader(operand, panel + i, group);
            starts[i] = all_starts + ((panel + i) * operand.groups() + group) * kRows;
        }
    }
    S8 words(int64_t group, int i, int column) const {
        return read<S8>(panels[column / kVectors].codes + (group * kWords + i) * kWordStride + column % kVectors * kLanes * kWords);
    }
    I32 start(int64_t group, int column) const {
        return kHasOffset ? read<I32>(starts[column / kVectors] + group * kRows + column % kVectors * kLanes) : I32{};
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

// Calls body(row, column) for the vectors of some rows. Unrolled early: else GCC keeps sums in memory.
template <int kCount, int kColumns, class Body>
INLINE inline void for_sums(Body body) {
#pragma GCC unroll 8
    for (int row = 0; row < kCount; row++)
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; column++) body(row, column);
}

// Adds the products of the groups up to `end`, which share scales: kStep of them, unless it is 0. Dots hold those of `most`
// groups, and are of some rows at a time, as registers allow.
template <int kStep, class Rows, class Right, int kColumns = Right::kCount>
INLINE inline void add_block(const Rows &left, const Right &right, int64_t first, int64_t end, int64_t most,
                             F32 (&sums)[kTileRows][kColumns]) {
    constexpr int kPart = kStep || kLanes == 8 ? 1 : kTileRows;
    F32 scales[kColumns];
    I32 starts[kColumns];
    for_sums<1, kColumns>([&](int, int c) INLINE {
        scales[c] = in_register(right.template scale<kStep>(first, c));
        starts[c] = right.start(first, c);
        for (int64_t group = first + 1; group < end; group++) starts[c] += right.start(group, c);
    });
#pragma GCC unroll 8
    for (int row = 0; row < kTileRows; row += kPart) {
        I32 products[kPart][kColumns];
        Dots dots[kPart][kColumns];
        for_sums<kPart, kColumns>([&](int r, int c) INLINE { products[r][c] = starts[c]; });
        for (int64_t group = first; group < end;) {
            const int64_t last = kStep ? end : std::min(group + most, end);
            for_sums<kPart, kColumns>([&](int r, int c) INLINE { dots[r][c] = begin_dots(products[r][c]); });
#pragma GCC unroll 2
            for (; group < last; group++)
#pragma GCC unroll 8
                for (int i = 0; i < kWords; i++)
                    for_sums<kPart, kColumns>([&](int r, int c) INLINE {
                        dots[r][c] = add_dots(dots[r][c], left.word(row + r, group, i), right.words(group, i, c));
                    });
            for_sums<kPart, kColumns>([&](int r, int c) INLINE { products[r][c] = end_dots(dots[r][c], products[r][c]); });
        }
        for_sums<kPart, kColumns>([&](int r, int c) INLINE {
            const float scale = left.template scale<kStep>(row + r, first);
            sums[row + r][c] = scaled(products[r][c], scales[c], scale, sums[row + r][c]);
        });
    }
}

// Adds the products of some groups to the sums of a tile, which begin at 0 unless it continues. `step` groups share scales:
// kStep, and of both operands, unless it is 0. Not inlined, and with copies of its arguments: else GCC keeps sums in memory.
template <int kStep, class Rows, class Right, int kColumns = Right::kCount>
__attribute__((noinline)) void add_groups(Rows left, Right right, int64_t groups, int64_t step, int64_t most,
                                          bool continues, F32 (&result)[kTileRows][kColumns]) {
    F32 sums[kTileRows][kColumns] = {};  // in registers
    if (continues) for_sums<kTileRows, kColumns>([&](int r, int c) INLINE { sums[r][c] = result[r][c]; });
    if (kStep) step = kStep;
    for (int64_t first = 0; first < groups; first += step)
        add_block<kStep>(left, right, first, kStep ? first + kStep : std::min(first + step, groups), most, sums);
    for_sums<kTileRows, kColumns>([&](int r, int c) INLINE { result[r][c] = sums[r][c]; });
}

// What an offset of the left operand adds to the sums of each group and row of the right one, negated.
void offsets_of(const Panels &panels, int32_t offset, int32_t *starts, int threads) {
    const int64_t groups = panels.groups() * panels.panels();
    const S8 ones = S8{} + 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && groups > 512)
    for (int64_t group = 0; group < groups; group++)
        for (int row = 0; row < kRows; row += kLanes) {
            Dots dots = begin_dots(I32{});
            for (int i = 0; i < kWords; i++)
                dots = add_dots(dots, ones, read<S8>(panels.codes + (group * kWords + i) * kWordStride + row * kWords));
            const I32 sums = end_dots(dots, I32{}) * -offset;
            memcpy(starts + group * kRows + row, &sums, sizeof sums);
        }
}

}  // namespace
