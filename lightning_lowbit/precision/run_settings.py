"""What a run was given, whatever its precision plugin: a seed, and a dtype for what is not quantised."""

import os

import torch

from lightning_lowbit._lightning import Precision


def global_seed() -> int:
    """The seed given to ``lightning.seed_everything``, which leaves it in the environment; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def compute_dtype(plugin: Precision) -> torch.dtype:
    """What a precision plugin, this package's or Lightning's own, leaves high-precision matrix products to."""
    dtype = getattr(plugin, "compute_dtype", None)  # this package's say so
    if isinstance(dtype, torch.dtype):
        return dtype
    names = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return next((dtype for name, dtype in names.items() if name in str(plugin.precision)), torch.float32)
