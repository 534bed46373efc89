"""Plain weights that hold quantized values: for any module and any architecture, in ``transformers`` or not.

Activations stay in high precision. Values are rounded to the dtype of the files, which for NVFP4 in bfloat16 is one
more rounding; float32 holds them exactly.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.export.folder import SafetensorsWriter, in_dtype, load_network, write_network, write_tokenizer
from lightning_lowbit.export.formats.base import Format, Options, Written
from lightning_lowbit.export.trained_model import TrainedModel
from lightning_lowbit.export.weights import common_obstacle, matrices, weight_cast
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.layers.multihead import Projection
from lightning_lowbit.quant import quantize


def _obstacle(name: str, layer: QuantizedLayer) -> str | None:
    if isinstance(layer, Projection):
        return (
            "parts of its weight share scales only where queries, keys and values are one tensor: train with "
            "skip=['in_proj']"
        )
    return common_obstacle(layer, stacks=True)


@torch.no_grad()
def _write(format: Format, original: TrainedModel, folder: Path, options: Options) -> list[Written]:
    format.check(original)
    names = {id(parameter): name for name, parameter in original.model.named_parameters()}
    writer, rows, written = SafetensorsWriter(folder), list[Written](), set[str]()
    for name, matrix, _ in matrices(original):
        layer = original.layers[name]
        parameter = names[id(layer.weight)]
        values = _quantized_parameter(layer, matrix)
        stored = in_dtype(parameter, values, options.dtype)
        rounding = float((stored.float() - values).abs().max())
        size = writer.add({parameter: stored})
        rows.append(Written(name, str(layer.casts.fprop_w), "dequantized", size, rounding))
        written.add(parameter)
    writer.finish(original, written, options.dtype)
    if original.config is None:
        write_tokenizer(original, folder)
    else:
        write_network(original, folder, options.dtype, None)
    return rows


def _quantized_parameter(layer: QuantizedLayer, matrix: Tensor) -> Tensor:
    """Returns the parameter of a layer, float32, with the quantized values of its matrix or stack of matrices."""
    cast = weight_cast(layer)
    stack = matrix if matrix.dim() > 2 else matrix[None]
    values = torch.stack([quantize(part, cast, amax=layer.scaled_by(part)).dequantize() for part in stack])
    parameter: Any = layer.weight
    trained = parameter.data
    parameter.data = torch.empty_like(trained, dtype=torch.float32)
    try:
        layer.set_weight_matrix(values.reshape(matrix.shape))
        filled: Tensor = parameter.data
    finally:
        parameter.data = trained
    return filled


FORMATS = {
    "dequantized": Format(
        "dequantized", _obstacle, _write, load_network, needs_network=False, programs=("transformers", "vLLM")
    )
}
