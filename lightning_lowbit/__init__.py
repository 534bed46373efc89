"""Low-bit training for PyTorch Lightning: FP4, FP8, and what keeps them stable.

trainer = Trainer(plugins=[FP4Precision("nvfp4")], callbacks=[PrecisionSummary()])
"""

# ruff: noqa: F403, F405
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from lightning_lowbit import _finders

if TYPE_CHECKING:
    from lightning_lowbit.callbacks import *
    from lightning_lowbit.export import export_checkpoint, load, load_compressed
    from lightning_lowbit.nn import (
        LinearCasts,
        bake,
        convert,
        fold,
        pack_frozen,
        register_linear,
        smooth_swiglu,
        unpack_frozen,
    )
    from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, Muon, StableSPAM
    from lightning_lowbit.precision import *
    from lightning_lowbit.quant import Cast, Hadamard, Scale, quantize

__version__ = "0.2.0"

_finders.install()

__all__ = [
    "SPAM",
    "Adaptive",
    "Below",
    "Cast",
    "ConservativeGradScaler",
    "CrashSafeCheckpoint",
    "ExactResume",
    "FP4Precision",
    "FP8Precision",
    "GracefulInterrupt",
    "GradientNormGradScaler",
    "GradientNoiseMonitor",
    "GradientNormMonitor",
    "Hadamard",
    "IntegerPrecision",
    "LinearCasts",
    "LossScaleMonitor",
    "LowBitAdamW",
    "LowBitPrecision",
    "LowBitProgressBar",
    "Muon",
    "OsciReset",
    "OutlierMonitor",
    "Plateau",
    "PrecisionSummary",
    "PrecisionSwitch",
    "QAFSwitch",
    "QuantizationMonitor",
    "RunReport",
    "Scale",
    "ShardedConservativeGradScaler",
    "ShardedGradientNormGradScaler",
    "ShardedStaticGradScaler",
    "SpikeRollback",
    "StableSPAM",
    "StaticGradScaler",
    "TernaryPrecision",
    "Throughput",
    "WeightDecaySwitch",
    "bake",
    "convert",
    "fold",
    "export_checkpoint",
    "load",
    "load_compressed",
    "pack_frozen",
    "quantize",
    "register_linear",
    "restore",
    "smooth_swiglu",
    "unpack_frozen",
]

if not TYPE_CHECKING:  # a type checker would take every name for one that is here

    def __getattr__(name: str) -> Any:
        """Imports what is asked for: a command that only lists recipes does not wait for torch."""
        if name in _submodules():
            return import_module(f"{__name__}.{name}")
        if name in __all__:
            for part in ("quant", "nn", "optim", "precision", "callbacks", "export"):  # from the bottom up
                module = import_module(f"{__name__}.{part}")
                if hasattr(module, name):
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_submodules()})

    def _submodules() -> set[str]:
        return {module.name for module in iter_modules(__path__)}
