"""Plain weights that hold quantized values: for any module and any architecture, in ``transformers`` or not.

Activations stay in high precision. Values are rounded to the dtype of the files, which for NVFP4 in bfloat16 is one
more rounding; float32 holds them exactly.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.export.folder import Shards, load_network, write_network, write_tokenizer
from lightning_lowbit.export.formats.base import Format, Options, Written
from lightning_lowbit.export.source import Source
from lightning_lowbit.export.weights import check, common_obstacle, matrix
from lightning_lowbit.nn.layers.multihead import Projection
from lightning_lowbit.nn.linear import QuantizedLayer
from lightning_lowbit.quant import Cast, quantize


def _obstacle(name: str, layer: QuantizedLayer) -> str | None:
    if isinstance(layer, Projection):
        return "parts of its weight share scales, as bake(model) says"
    return common_obstacle(layer, stacks=True)


@torch.no_grad()
def _write(source: Source, folder: Path, options: Options) -> list[Written]:
    check(source, {name: _obstacle(name, layer) for name, layer in source.layers.items()}, "dequantized")
    names = {id(parameter): name for name, parameter in source.model.named_parameters()}
    by_parameter: dict[int, list[str]] = {}
    for name, layer in source.layers.items():
        by_parameter.setdefault(id(layer.weight), []).append(name)
    shards, rows, written = Shards(folder), list[Written](), set[str]()
    for key, layers in by_parameter.items():
        values = quantized_parameter(source, layers)
        stored = values.to(options.dtype)
        written.add(names[key])
        size = shards.add({names[key]: stored})
        for name in layers:
            rounding = float((stored.float() - values.float()).abs().max())
            cast = source.layers[name].casts.fprop_w
            rows.append(Written(name, str(cast), "dequantized", size // len(layers), rounding))
    shards.add_dense(source, written, options.dtype)
    shards.close()
    if source.config is None:
        write_tokenizer(source.facts.get("tokenizer"), folder)
    else:
        write_network(source, folder, options.dtype, None)
    return rows


def quantized_parameter(source: Source, layers: list[str]) -> Tensor:
    """The parameter that some layers have as weight, float32, with its quantized values."""
    first: Any = source.layers[layers[0]]
    kept = first.weight.data
    first.weight.data = kept.clone().float()
    try:
        for name in layers:
            layer = source.layers[name]
            matrices = matrix(source, layer)
            stack = matrices if matrices.dim() > 2 else matrices[None]
            values = torch.stack([_values(layer, one) for one in stack])
            layer.set_weight_matrix(values.reshape(matrices.shape))
        return first.weight.data
    finally:
        first.weight.data = kept


def _values(layer: QuantizedLayer, weight: Tensor) -> Tensor:
    cast = layer.casts.cast_of("fprop_w")
    assert isinstance(cast, Cast)
    return quantize(weight, cast, amax=layer.scaled_by(weight)).dequantize()


FORMATS = {
    "dequantized": Format(
        "dequantized",
        "plain weights with quantized values: anything",
        _obstacle,
        _write,
        load_network,
        needs_network=False,
    )
}
