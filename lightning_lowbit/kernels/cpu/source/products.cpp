// What is left to do around the casts of a GEMM: amaxes of delayed scaling before them; factors, bias, and the rounding of
// the result after it.

#include <cmath>

#include "lanes.h"

// A factor of the result: float, by how many of them there are.
enum Extent : int32_t { kAbsent, kOne, kPerRow, kPerColumn };

namespace {

struct Factor {
    const float *values;
    int32_t extent;

    F32 of_row(int64_t row) const { return all(extent == kPerRow ? values[row] : extent == kOne ? *values : 1.0f); }
};

template <class In, class Bias, class Out>
void scale(const In *product, int64_t rows, int64_t columns, const Factor *factors, const Bias *bias, Out *result,
           int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * columns > 8192)
    for (int64_t row = 0; row < rows; row++) {
        const In *from = product + row * columns;
        Out *to = result + row * columns;
        const Factor first = factors[0], second = factors[1];
        const F32 by[2] = {first.of_row(row), second.of_row(row)};
        auto scale_at = [&](int64_t column, int count) {
            F32 value = load(from + column, count) * (first.extent == kPerColumn ? load(first.values + column, count) : by[0]);
            if (second.extent != kAbsent)
                value = value * (second.extent == kPerColumn ? load(second.values + column, count) : by[1]);
            if (bias) value = value + load(bias + column, count);
            store(to + column, value, count);
        };
        const int64_t whole = columns / kLanes * kLanes;
        for (int64_t column = 0; column < whole; column += kLanes) scale_at(column, kLanes);
        if (whole < columns) scale_at(whole, int(columns - whole));
    }
}

template <class In, class Bias>
void scale_to(const In *product, int64_t rows, int64_t columns, const Factor *factors, const Bias *bias, void *result,
              int32_t dtype, int threads) {
    if (dtype == 0)
        scale(product, rows, columns, factors, bias, (float *)result, threads);
    else
        scale(product, rows, columns, factors, bias, (BF16 *)result, threads);
}

}  // namespace

// product * first * second + bias, rounded once. Dtypes: 0 float, 1 bfloat16; of a product also 2 int8, 3 int32.
EXPORT void lowbit_scale_and_round(const void *product, int32_t product_dtype, int64_t rows, int64_t columns,
                                   const float *first, int32_t first_extent, const float *second, int32_t second_extent,
                                   const void *bias, int32_t bias_dtype, void *result, int32_t result_dtype,
                                   int32_t threads) {
    const Factor factors[2] = {{first, first_extent}, {second, second_extent}};
    auto with_bias = [&](auto *typed) {
        if (bias_dtype == 0)
            scale_to(typed, rows, columns, factors, (const float *)bias, result, result_dtype, threads);
        else
            scale_to(typed, rows, columns, factors, (const BF16 *)bias, result, result_dtype, threads);
    };
    switch (product_dtype) {
        case 1: return with_bias((const BF16 *)product);
        case 2: return with_bias((const int8_t *)product);
        case 3: return with_bias((const int32_t *)product);
        default: return with_bias((const float *)product);
    }
}

// Raises `staged` (null: records nothing) to a finite amax at the places whose bits are set, and writes the amax in
// force or, while it is 0, the operand's own.
EXPORT void lowbit_delayed_amax(const float *own, const float *in_force, float *staged, int32_t places, float *result) {
    const float amax = *own;
    for (int place = 0; staged && std::isfinite(amax) && places >> place; place++)
        if (places >> place & 1 && amax > staged[place]) staged[place] = amax;
    *result = *in_force > 0.0f ? *in_force : amax;
}
