// Casts of matrices in bfloat16: casts.cpp has the others.

#include "casts.h"

void cast_bf16(const void *x, int64_t rows, int64_t columns, const Rotation *rotation, const float *amax,
               const CastNumbers &numbers, const Output &output, int threads) {
    cast_all(Matrix<BF16>((const BF16 *)x, rows, columns, rotation), amax, numbers, output, threads);
}
