"""Smoothing per channel, folded into weights: rows of up projections are multiplied by powers of two.

A scale of several rows then rounds them otherwise than in training: that of a tensor, of a tile, or of a second level.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_lowbit.nn.conversion.shared_amax import share
from lightning_lowbit.nn.conversion.smooth_swiglu import fold, swiglus
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.quant import Cast, quantize, smoothing_factor
from lightning_lowbit.quant.shard import amax_of


@torch.no_grad()
def fold_smoothing(model: nn.Module, groups: Sequence[Sequence[str]], dtype: torch.dtype) -> dict[str, float]:
    """Folds the smoothing of a model into its weights, in place.

    Args:
        model: restored, with MLPs that are smoothed by channels.
        groups: of layers that share an amax, by name.
        dtype: of the training's computation.

    Returns:
        By layer, the largest change of its quantized weight, where there is one.
    """
    layers = {clean_name(name): layer for name, layer in quantized_layers(model).items()}
    factors: dict[str, Tensor] = {}  # of the rows of up projections
    for name, mlp in swiglus(model).items():
        if getattr(mlp.down_proj, "casts", None) is not None and mlp.down_proj.casts.smooth == "channel":
            factors[clean_name(f"{name}.up_proj")] = smoothing_factor(mlp.down_proj.lowbit.amaxes.channels)
    names = {*factors, *(name for group in groups if factors.keys() & {*group} for name in group)}
    changing = {name: layers[name] for name in names & layers.keys() if layers[name].casts.fprop_w is not None}
    before = _weights(layers, changing, groups, dtype)
    fold(model)
    after = _weights(layers, changing, groups, dtype)
    errors = {}
    for name, weight in before.items():
        expected = weight * factors[name][:, None] if name in factors else weight
        errors[name] = float((after[name] - expected).abs().max())
    return {name: error for name, error in errors.items() if error > 0}


def _weights(
    layers: Mapping[str, QuantizedLayer],
    names: Mapping[str, QuantizedLayer],
    groups: Sequence[Sequence[str]],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Returns the weights of layers by name, as the forward pass quantizes them, float32."""
    matrices = {name: layers[name].weight_matrix().detach().to(dtype) for name in {*names, *sum(map(list, groups), [])}}
    for group in groups:
        share([layers[name] for name in group], torch.stack([amax_of(matrices[name]) for name in group]))
    values = {}
    for name, layer in names.items():
        assert isinstance(cast := layer.casts.fprop_w, Cast)
        values[name] = quantize(matrices[name], cast, amax=layer.scaled_by(matrices[name])).dequantize()
    for name in (name for group in groups for name in group):
        layers[name].lowbit.weight_amax = None
    return values
