"""Low-bit training for PyTorch Lightning: FP4, FP8, and what keeps them stable.

trainer = Trainer(plugins=[FP4Precision("nvfp4", skip=["lm_head"])], callbacks=[QAFSwitch(at=0.9)])
"""

from lightning_lowbit.callbacks import (
    ExactResume,
    GracefulInterrupt,
    LowBitProgressBar,
    PrecisionSummary,
    PrecisionSwitch,
    QAFSwitch,
    RunReport,
    Throughput,
)
from lightning_lowbit.nn import LinearCasts, convert, fold, smooth_swiglu
from lightning_lowbit.optim import StableSPAM
from lightning_lowbit.precision import FP4Precision, FP8Precision, LowBitPrecision
from lightning_lowbit.quant import Cast, Hadamard, Scale, quantize

__version__ = "0.1.0"

__all__ = [
    "Cast",
    "ExactResume",
    "FP4Precision",
    "FP8Precision",
    "GracefulInterrupt",
    "Hadamard",
    "LinearCasts",
    "LowBitPrecision",
    "LowBitProgressBar",
    "PrecisionSummary",
    "PrecisionSwitch",
    "QAFSwitch",
    "RunReport",
    "Scale",
    "StableSPAM",
    "Throughput",
    "convert",
    "fold",
    "quantize",
    "smooth_swiglu",
]
