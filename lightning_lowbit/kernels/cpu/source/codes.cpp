// From codes and scales back to an operand's values.

#include <vector>

#include "codes.h"
#include "panels.h"

namespace {

// One for each column of a row: the scale of its tile.
void spread_scales(const Codes &codes, const CastNumbers &numbers, int64_t columns, int64_t first, float *scales) {
    int64_t width = numbers.tile_columns, blocks = (columns + width - 1) / width;
    for (int64_t at = 0; at < blocks; at += kLanes) {
        int count = int(blocks - at < kLanes ? blocks - at : kLanes);
        F32 values = take_scales(codes, first + at, numbers.scale, count);
        if (width == 1) {
            store(scales + at, values);
            continue;
        }
        for (int i = 0; i < count; i++)
            for (int64_t column = (at + i) * width; column < (at + i + 1) * width; column++) scales[column] = values[i];
    }
}

template <class Out>
void unpack(const uint8_t *source, int64_t rows, int64_t columns, const Codes &codes, const CastNumbers &numbers,
            Out *values,
            int threads) {
    const int64_t height = numbers.per_block ? numbers.tile_rows : 8, strips = (rows + height - 1) / height;
    const int64_t across = numbers.per_block ? (columns + numbers.tile_columns - 1) / numbers.tile_columns : 0;
    const bool through = numbers.through_bf16;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * columns > 8192)
    for (int64_t strip = 0; strip < strips; strip++) {
        static thread_local std::vector<float> buffer;
        if (numbers.per_block) {
            if (buffer.size() < size_t(columns + numbers.tile_columns + kLanes))
                buffer.resize(columns + numbers.tile_columns + kLanes);
            spread_scales(codes, numbers, columns, strip * across, buffer.data());
        }
        const float *scales = buffer.data();
        for (int64_t row = strip * height; row < rows && row < (strip + 1) * height; row++) {
            for (int64_t at = 0; at < columns; at += kLanes) {
                int count = int(columns - at < kLanes ? columns - at : kLanes);
                U32 code = take_codes(codes, source, row * columns + at, count);
                F32 value = value_of(code, numbers.element, codes);
                if (numbers.per_block) value = value * load(scales + at);
                if (through) value = widen(narrow(value));
                put(values + row * columns + at, value, count);
            }
        }
    }
}

// The codes of four neighbors along k of each row of panels, from `at` on; zeros behind the last.
void put_words(const uint8_t *source, int64_t at, int64_t columns, const Codes &codes, const Grid &grid,
               const Panels &panels) {
    const Units units(grid);
    const bool across = panels.dim == 0;  // `at` is an element of k, else a row
    std::vector<int8_t> lines((across ? kWords : 1) * (columns + kGroup), 0);
    for (int64_t i = 0; i < (across ? kWords : 1) && (!across || at + i < panels.inner); i++)
        for (int64_t column = 0; column < columns; column += kLanes) {
            int count = int(columns - column < kLanes ? columns - column : kLanes);
            U32 code = take_codes(codes, source, (at + i) * columns + column, count);
            int8_t *line = lines.data() + i * (columns + kGroup) + column;
            store_codes((uint8_t *)line, (U32)(units.of(value_of(code, grid, codes)) + panels.offset), count);
        }
    if (across)
        for (int64_t row = 0; row < columns; row++)
            for (int64_t i = 0; i < kWords; i++) panels.word(row, at)[i] = lines[i * (columns + kGroup) + row];
    else
        for (int64_t k = 0; k < panels.groups() * kGroup; k += kWords) memcpy(panels.word(at, k), lines.data() + k, kWords);
}

}  // namespace

// Unpacks a matrix [rows, columns] to the panels of a GEMM.
void unpack_to_panels(const void *source, int64_t rows, int64_t columns, const Codes &codes, const CastNumbers &numbers,
                      const Panels &panels, int threads) {
    const int64_t lines = panels.dim == 0 ? panels.groups() * kGroup / kWords : rows, height = panels.dim == 0 ? kWords : 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * columns > 8192)
    for (int64_t line = 0; line < lines; line++)
        put_words((const uint8_t *)source, line * height, columns, codes, numbers.element, panels);
    const int64_t wide = numbers.tile_columns, high = numbers.tile_rows;
    if (!panels.block) return;
    const int64_t across = (columns + wide - 1) / wide;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * columns > 8192)
    for (int64_t row = 0; row < panels.rows; row++)
        for (int64_t block = 0; block < panels.blocks(); block++) {
            int64_t tile = panels.dim == 0 ? block * across + row / wide : row / high * across + block;
            *panels.scale(row, block) = take_scales(codes, tile, numbers.scale, 1)[0];
        }
}

// Writes [rows, columns] from the codes at `source`, float where `dtype` is 0, bfloat16 where it is 1, int8 where it is 2.
EXPORT void lowbit_unpack(const void *source, int64_t rows, int64_t columns, const Codes *codes,
                          const CastNumbers *numbers,
                          void *values, int32_t dtype, int32_t threads) {
    const uint8_t *bytes = (const uint8_t *)source;
    if (dtype == 0) unpack(bytes, rows, columns, *codes, *numbers, (float *)values, threads);
    if (dtype == 1) unpack(bytes, rows, columns, *codes, *numbers, (BF16 *)values, threads);
    if (dtype == 2) unpack(bytes, rows, columns, *codes, *numbers, (int8_t *)values, threads);
}
