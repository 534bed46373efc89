"""The weights that callbacks watch: a forward pass rounds them to nearest."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_lowbit._lightning import Callback, LightningModule, MisconfigurationException, Trainer
from lightning_lowbit.distributed import forget_gathered
from lightning_lowbit.nn import LinearCasts, QuantizedLayer
from lightning_lowbit.nn.layers.layer import quantized_layers
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.quant import Cast, Quantized, quantize
from lightning_lowbit.quant.shard import amax_of
from lightning_lowbit.quant.statistics import sample


class LatentWeight(NamedTuple):
    """A weight ``[out_features, in_features]`` in the compute dtype, and how a forward pass rounds it to nearest.

    ``amax`` (0-d) is the magnitude that its scale is made for; None for its own.
    """

    values: Tensor
    cast: Cast
    amax: Tensor | None = None

    def quantize(self) -> Quantized:
        return quantize(self.values, self.cast, amax=self.amax)

    def sample(self) -> "LatentWeight":
        """Returns a fixed choice of rows of a large weight, with the scales of the whole."""
        amax = amax_of(self.values) if self.amax is None and self.cast.scale.needs_amax else self.amax
        return LatentWeight(sample(self.values, self.values.shape, self.cast, -1), self.cast, amax)


def converted_layers(pl_module: LightningModule) -> dict[str, QuantizedLayer]:
    return {clean_name(name): layer for name, layer in quantized_layers(pl_module).items()}


def has_flat_weights(trainer: Trainer) -> bool:
    assert trainer.model is not None
    return any(isinstance(module, FullyShardedDataParallel) for module in trainer.model.modules())


def whole_layers(callback: Callback, trainer: Trainer, pl_module: LightningModule) -> dict[str, QuantizedLayer]:
    """Returns the converted layers that have weights, by name; raises a ``MisconfigurationException`` if sharded."""
    assert trainer.model is not None
    forget_gathered(trainer.model)  # after a sanity check FSDP2's root has whole weights
    layers = {name: layer for name, layer in converted_layers(pl_module).items() if layer.weight is not None}
    if layers and (has_flat_weights(trainer) or any(isinstance(layer.weight, DTensor) for layer in layers.values())):
        raise MisconfigurationException(
            f"{type(callback).__name__} needs whole weights in each process, and {type(trainer.strategy).__name__} "
            "shards them: leave it out, or train with one device or DDP."
        )
    return layers


def nearest_cast(casts: LinearCasts) -> Cast | None:
    """Returns the cast of a weight that is rounded to nearest; None for others, and for rotated or smoothed weights."""
    cast = casts.cast_of("fprop_w")
    if cast is None or cast.draws or "fprop" in casts.hadamard or casts.smooth == "channel":
        return None
    return cast


def latent_weights(layers: Mapping[str, QuantizedLayer], dtype: torch.dtype) -> Iterator[tuple[str, LatentWeight]]:
    """Yields (name, weight) of the weights that the current casts round to nearest; none while λ is 0.

    A stack of matrices (experts, grouped convolutions) is one matrix if its scales are of rows; others are left out.
    Reading λ while it changes waits for the device once. DTensors are gathered one by one, so all ranks must iterate
    alike. ``dtype`` is the compute dtype.
    """
    blends = {id(layer.lowbit.blend): layer.lowbit.blend for layer in layers.values() if layer.lowbit.blend is not None}
    off = {key for key, blend in blends.items() if not blend}
    for name, layer in layers.items():
        cast = None if layer.weight is None else nearest_cast(layer.casts)
        if cast is not None and id(layer.lowbit.blend) not in off:
            values = layer.weight_matrix().detach().to(dtype)
            if values.dim() > 2:  # a stack of matrices; with scales of rows, as good as one
                if cast.scale.needs_amax or cast.scale.block == "tensor" or isinstance(cast.scale.block, tuple):
                    continue
                values = values.flatten(0, -2)
            if isinstance(values, DTensor):
                values = values.full_tensor()
            yield name, LatentWeight(values, cast, layer.scaled_by(values))
