// Functions of whole matrices: casts, the largest magnitude, rotations.

#include "casts.h"

void cast_float(const void *x, int64_t rows, int64_t columns, const Rotation *rotation, const float *amax,
                const CastNumbers &numbers, const Output &output, int threads) {
    cast_all(Matrix<float>((const float *)x, rows, columns, rotation), amax, numbers, output, threads);
}

// Calls body with a contiguous matrix [rows, columns], float where `dtype` is 0 and bfloat16 where it is 1.
template <class Body>
void of_matrix(const void *x, int32_t dtype, int64_t rows, int64_t columns, const Rotation *rotation, Body body) {
    if (dtype == 0)
        body(Matrix<float>((const float *)x, rows, columns, rotation));
    else
        body(Matrix<BF16>((const BF16 *)x, rows, columns, rotation));
}

// Casts a matrix, which is rotated before unless `rotation` is null. `amax` may be null; so may `place`, of a shard: the
// columns of the global matrix and its first element's index there; and `codes` and `panels`, unless these are written.
EXPORT void lowbit_cast(const void *x, int64_t rows, int64_t columns, const CastNumbers *numbers, void *values,
                        float *factor,
                        const int64_t *key, const float *amax, const Rotation *rotation, const int32_t *place,
                        const Codes *codes, const Panels *panels, int32_t threads) {
    of_matrix(x, numbers->input, rows, columns, rotation, [&](const auto &matrix) {
        int64_t width = numbers->tile_columns ? numbers->tile_columns : 1;
        int64_t padded = (matrix.columns + width - 1) / width * width;
        int32_t dtype = panels ? 4 : codes ? 3 : numbers->output;
        Output output = {values, factor, key, dtype, place ? place[0] : int32_t(padded),
                         place ? place[1] : 0, codes ? *codes : Codes{}, panels ? *panels : Panels{}};
        (numbers->input ? cast_bf16 : cast_float)(x, rows, columns, rotation, amax, *numbers, output, threads);
    });
}

// The largest magnitude of a matrix; infinite or NaN if an element is.
EXPORT void lowbit_amax(const void *x, int32_t dtype, int64_t rows, int64_t columns, const Rotation *rotation,
                        float *result, int32_t threads) {
    of_matrix(x, dtype, rows, columns, rotation, [&](const auto &matrix) { *result = amax_of(matrix, threads); });
}

// Writes a rotated matrix, zero-padded to whole groups, in the type of `x`.
EXPORT void lowbit_rotate(const void *x, int32_t dtype, int64_t rows, int64_t columns, const Rotation *rotation,
                          void *result, int32_t threads) {
    of_matrix(x, dtype, rows, columns, rotation, [&](const auto &matrix) {
        auto target = (std::remove_const_t<std::remove_pointer_t<decltype(matrix.x)>> *)result;
        for_rectangles(matrix, threads, [&](int64_t, int64_t top, int64_t left, int64_t height, int64_t width) {
            int64_t stride;
            auto values = matrix.read(top, left, height, width, stride);
            for (int64_t row = 0; row < height; row++)
                memcpy(target + (top + row) * matrix.columns + left, values + row * stride, width * sizeof *target);
        });
    });
}
