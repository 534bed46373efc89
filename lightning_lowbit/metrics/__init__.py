"""Measures of runs, of casts, of weights in training, and of outliers."""

from lightning_lowbit.metrics.casts import CastStatistics, bias, cast_statistics, code_histogram, levels, mse, sqnr
from lightning_lowbit.metrics.noise import gradient_noise_sums, gradient_to_noise
from lightning_lowbit.metrics.outliers import SwiGLUAlignment, swiglu_alignment
from lightning_lowbit.metrics.spikes import count_spikes
from lightning_lowbit.metrics.weights import (
    expected_zeros,
    flip_rate,
    flipped,
    is_ternary,
    ternary_shares,
    threshold_distance,
)

__all__ = [
    "CastStatistics",
    "SwiGLUAlignment",
    "bias",
    "cast_statistics",
    "code_histogram",
    "count_spikes",
    "expected_zeros",
    "flip_rate",
    "flipped",
    "is_ternary",
    "gradient_noise_sums",
    "gradient_to_noise",
    "levels",
    "mse",
    "sqnr",
    "swiglu_alignment",
    "ternary_shares",
    "threshold_distance",
]
