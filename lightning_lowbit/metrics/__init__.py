"""Numbers that tell how a run went, what a cast makes of a tensor, and where outliers are about to come from."""

from lightning_lowbit.metrics.casts import (
    CastStatistics,
    bias,
    cast_statistics,
    code_histogram,
    levels,
    mse,
    sqnr,
)
from lightning_lowbit.metrics.runs import count_spikes
from lightning_lowbit.metrics.swiglu import SwiGLUAlignment, swiglu_alignment

__all__ = [
    "CastStatistics",
    "SwiGLUAlignment",
    "bias",
    "cast_statistics",
    "code_histogram",
    "count_spikes",
    "levels",
    "mse",
    "sqnr",
    "swiglu_alignment",
]
