"""Settings of a run: Trainer, seed, data-parallel rank, and the dtype of what is not quantized."""

import os
from typing import Literal

import torch
from torch import nn

from lightning_lowbit._lightning import (
    NAME,
    DeepSpeedStrategy,
    LightningModule,
    MisconfigurationException,
    Precision,
    StochasticWeightAveraging,
    Trainer,
    WeightAveraging,
)
from lightning_lowbit.checks import some
from lightning_lowbit.nn.conversion.layers import quantized_layers
from lightning_lowbit.nn.keys import clean_name

#: By the name that plugins take: Lightning's precision name, and the dtype.
COMPUTE_DTYPES: dict[str, tuple[Literal["bf16-mixed", "16-mixed", "32-true"], torch.dtype]] = {
    "bf16": ("bf16-mixed", torch.bfloat16),
    "fp16": ("16-mixed", torch.float16),
    "fp32": ("32-true", torch.float32),
}


def run_of(plugin: Precision, module: nn.Module) -> tuple[Trainer, LightningModule]:
    """Returns the Trainer of a module and the module; raises ``MisconfigurationException`` outside a Trainer, and for
    a strategy or callback that would not compute what it should."""
    name = type(plugin).__name__
    trainer = getattr(module, "_trainer", None)
    if trainer is None or not isinstance(module, LightningModule):
        raise MisconfigurationException(
            f"{name} is a plugin of {NAME}.Trainer; it got {type(module).__name__} outside a Trainer. Else call "
            "lightning_lowbit.convert(model, casts), and set keys with lightning_lowbit.nn.LayerKeys."
        )
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        raise MisconfigurationException(
            f"{name} runs backward passes and optimizers itself, and so does DeepSpeed. Train with DDPStrategy, "
            "FSDPStrategy, or ModelParallelStrategy (FSDP2), which shards what ZeRO does."
        )
    packed = [clean_name(layer) for layer, each in quantized_layers(module).items() if each.frozen is not None]
    averages = (StochasticWeightAveraging, WeightAveraging)
    averaging = next((callback for callback in trainer.callbacks if isinstance(callback, averages)), None)
    if packed and averaging is not None:
        raise MisconfigurationException(
            f"{type(averaging).__name__} averages all parameters, and codes, which {some(packed)} keep instead of a "
            "weight, are no numbers to average. Call unpack_frozen(model) first, or leave out the callback."
        )
    return trainer, module


def data_rank(trainer: Trainer) -> int:
    """The data-parallel rank of this process: model-parallel ranks that see the same data have the same."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(sampler.get("rank", trainer.global_rank))


def global_seed() -> int:
    """The seed of ``seed_everything``, which stores it in the environment; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def compute_dtype(plugin: Precision) -> torch.dtype:
    """The dtype of high-precision matrix products under a precision plugin of this package or Lightning."""
    dtype = getattr(plugin, "compute_dtype", None)  # of this package's plugins
    if isinstance(dtype, torch.dtype):
        return dtype
    names = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return next((dtype for name, dtype in names.items() if name in str(plugin.precision)), torch.float32)
