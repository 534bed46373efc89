"""Folders as NVIDIA's Model Optimizer writes them, for TensorRT-LLM, vLLM and SGLang: NVFP4 and FP8.

Codes lie as in ``compressed_tensors``; scales of the tensor multiply here, and divide there:

    weight, weight_scale, weight_scale_2, input_scale       NVFP4: amax / 2688 (of the weight, of the input)
    weight, weight_scale, input_scale                       FP8 per tensor: amax / 448

Without calibration, or inputs in NVFP4 in training, NVFP4 is for weights alone (``W4A16_NVFP4``).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_lowbit.export.folder import write_json
from lightning_lowbit.export.formats import compressed_tensors
from lightning_lowbit.export.formats.base import (
    Encoded,
    Format,
    Inputs,
    Options,
    Written,
    by_layer,
    unquantized_linears,
)
from lightning_lowbit.export.formats.compressed_tensors import NVFP4, input_amax, is_nvfp4
from lightning_lowbit.export.formats.packing import by_row, nibbles
from lightning_lowbit.export.trained_model import TrainedModel
from lightning_lowbit.export.weights import Weight, weight_cast
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.quant import Cast, Scale

_PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # whose format this is


def _encode(algorithm: str, weight: Weight, options: Options) -> Encoded:
    q = weight.quantized
    amax = None if algorithm == "W4A16_NVFP4" else input_amax(weight, options)
    if algorithm == "FP8":
        assert amax is not None
        tensors = {
            "weight": q.codes.view(torch.float8_e4m3fn),
            "weight_scale": q.scales.reshape(()).float().clone(),
            "input_scale": torch.tensor(amax) / 448,
        }
        return Encoded(tensors, algorithm, Inputs(Cast("e4m3", Scale("fp32", "tensor")), amax))
    assert q.tensor_scale is not None
    tensors = {
        "weight": nibbles(q.codes),
        "weight_scale": by_row(q, q.scales),
        "weight_scale_2": q.tensor_scale.clone(),
    }
    if amax is None:
        return Encoded(tensors, algorithm)
    return Encoded({**tensors, "input_scale": torch.tensor(amax) / 2688}, algorithm, Inputs(NVFP4, amax))


def _fp8_obstacle(name: str, layer: QuantizedLayer) -> str | None:
    if (reason := compressed_tensors.FORMATS["fp8"].obstacle(name, layer)) is not None:
        return reason
    cast, x = weight_cast(layer), layer.casts.fprop_x
    if cast.scale.block != "tensor":
        return f"it takes FP8 with one scale of the tensor, and the weight has {cast}; take fp8"
    if x is None or (x.element, x.scale.block) != ("e4m3", "tensor"):
        return f"engines would quantize its input to E4M3 with one scale, and the training had {x}; take fp8"
    return None


def _write(format: Format, original: TrainedModel, folder: Path, options: Options) -> list[Written]:
    calibrated = options.input_amaxes is not None and all(
        is_nvfp4(layer.casts.fprop_x) for layer in original.layers.values()
    )
    algorithm = "FP8" if format.name == "modelopt-fp8" else "NVFP4" if calibrated else "W4A16_NVFP4"
    return by_layer(partial(_encode, algorithm), partial(_configure, algorithm))(format, original, folder, options)


def _configure(algorithm: str, original: TrainedModel, folder: Path, _: Mapping[str, Encoded]) -> Mapping[str, Any]:
    group, ignored = None if algorithm == "FP8" else 16, unquantized_linears(original)
    quantization = {"kv_cache_quant_algo": None, "group_size": group, "exclude_modules": ignored}
    content = {"producer": _PRODUCER, "quantization": {"quant_algo": algorithm, **quantization}}
    write_json(folder / "hf_quant_config.json", content)
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": group, "ignore": ignored}
    return {**config, "producer": _PRODUCER}


_NVFP4_WEIGHTS = compressed_tensors.FORMATS["nvfp4-w4a16"]
FORMATS = {
    name: Format(
        name, obstacle, _write, fused=True, own_cast=own_cast, programs=("TensorRT-LLM", "vLLM", "lightning_lowbit")
    )
    for name, obstacle, own_cast in (
        ("modelopt-nvfp4", _NVFP4_WEIGHTS.obstacle, _NVFP4_WEIGHTS.own_cast),
        ("modelopt-fp8", _fp8_obstacle, None),
    )
}
