"""What a run was given, whatever its precision plugin: a Trainer, a seed, and a dtype for what is not quantized."""

import os

import torch
from torch import nn

from lightning_lowbit._lightning import (
    NAME,
    DeepSpeedStrategy,
    LightningModule,
    MisconfigurationException,
    Precision,
    Trainer,
)


def run_of(plugin: Precision, module: nn.Module) -> tuple[Trainer, LightningModule]:
    """The Trainer and the model that a precision plugin of this package is to convert.

    Raises:
        MisconfigurationException: there is none, or its strategy does what the plugin does.
    """
    name = type(plugin).__name__
    trainer = getattr(module, "_trainer", None)
    if trainer is None or not isinstance(module, LightningModule):
        raise MisconfigurationException(
            f"{name} is a plugin of {NAME}.Trainer and converts a LightningModule; it got {type(module).__name__} "
            "outside a Trainer. With Fabric or plain PyTorch, call lightning_lowbit.convert(model, casts) and set keys "
            "with lightning_lowbit.nn.LayerKeys."
        )
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        raise MisconfigurationException(
            f"{name} runs backward passes and optimizers itself, and so does DeepSpeed. Train with DDPStrategy, "
            "FSDPStrategy, or ModelParallelStrategy (FSDP2), which shards what ZeRO does."
        )
    return trainer, module


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
