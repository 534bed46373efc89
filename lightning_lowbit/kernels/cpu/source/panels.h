// The layout in which block-scaled GEMMs read both operands: panels of 16 rows, with the contraction axis k across.
//
// Of 16 rows and 16 elements of k, the first four elements of all rows lie together, then the next four, and so on: four
// times 64 bytes. Elements are whole numbers, int8, in units of the format's smallest step. Scales are float, 16 rows
// side by side. Panels are filled up along k: with zeros, or with the offset; rows behind the last one may hold anything.
#pragma once

#include "lanes.h"

constexpr int64_t kRows = 16, kGroup = 16, kWords = 4;  // rows of a panel; elements of k in a group, and words of a row in it
constexpr int64_t kWordStride = kRows * kWords;         // bytes from a word of a row to its next one

// Where an operand lies. `rows` and `inner` are its size without what is filled up; its scales are of `block` elements of
// k each, a multiple of kGroup, or there are none, and `block` is 0.
struct Panels {
    int8_t *codes;
    float *scales;
    int64_t rows, inner;
    int32_t dim, block;  // k is dimension `dim` of the matrix that the operand is cast from
    int32_t offset;      // what is added to all codes, but perhaps not to zeros behind the last ones

    int64_t panels() const { return (rows + kRows - 1) / kRows; }
    int64_t groups() const { return (inner + kGroup - 1) / kGroup; }
    int64_t blocks() const { return block ? (inner + block - 1) / block : 0; }
    int64_t code_bytes() const { return panels() * groups() * kRows * kGroup; }
    int64_t scale_count() const { return panels() * blocks() * kRows; }

    // Of the four elements from k on, a multiple of four, in one row; the next four are kWordStride bytes further.
    int8_t *word(int64_t row, int64_t k) const {
        return codes + row / kRows * (groups() * kGroup * kRows) + row % kRows * kWords + k * kRows;
    }
    float *scale(int64_t row, int64_t block_of_k) const {
        return scales + (row / kRows * blocks() + block_of_k) * kRows + row % kRows;
    }
};
