// Random numbers of the elements of a strip, 16 bits each.
#pragma once

#include "scales.h"

namespace {

// Writes the numbers of some short rows at a time, as a CPU waits for what it has just written.
template <class In>
struct RandomRows {
    const Strip<In> &strip;
    const uint32_t low, high, all_columns, first;  // the key; and the index is row * all_columns + column + first
    const int64_t room, count;
    uint16_t *const numbers;

    // Of at least so many rows, from a multiple of that on, numbers stay until other rows are asked for.
    RandomRows(const Strip<In> &strip, int64_t key, int32_t all_columns, int32_t first, int64_t least = 1)
        : strip(strip), low(uint32_t(key)), high(uint32_t(uint64_t(key) >> 32)), all_columns(uint32_t(all_columns)),
          first(uint32_t(first)), room(strip.columns + 6 * kLanes), count(count_of(strip.columns, least)),
          numbers(buffer<uint16_t>(room * count, 0)) {}

    static int64_t count_of(int64_t columns, int64_t least) {
        while (least * columns < kPanel) least *= 2;
        return least;
    }

    uint32_t index(int64_t row) const {
        return uint32_t(strip.row + row) * all_columns + uint32_t(strip.column) + first;
    }

    __attribute__((noinline)) const uint16_t *at(int64_t row) const {  // apart, for the registers of loops over elements
        for (int64_t i = 0; row % count == 0 && i < count && row + i < strip.rows; i++)
            write_random(numbers + room * i, index(row + i) & ~3u, strip.columns + (index(row + i) & 3), low, high);
        return numbers + room * (row % count) + (index(row) & 3);
    }
};

}  // namespace
