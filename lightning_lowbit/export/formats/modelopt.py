"""Folders as NVIDIA's Model Optimizer writes them, for TensorRT-LLM, vLLM and SGLang: NVFP4 and FP8.

The codes are those of ``compressed_tensors``; scales of the tensor multiply where those divide:

    weight, weight_scale, weight_scale_2, input_scale       NVFP4: amax / 2688 (of the weight, of the input)
    weight, weight_scale, input_scale                       FP8 per tensor: amax / 448

Without calibration, or inputs in NVFP4 in training, NVFP4 is for weights alone (``W4A16_NVFP4``).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowbit.export.folder import Shards, write_json, write_network
from lightning_lowbit.export.formats.base import Format, Inputs, Options, Written, row
from lightning_lowbit.export.formats.compressed_tensors import KINDS, input_amax, obstacle
from lightning_lowbit.export.formats.holding import takes_nvfp4
from lightning_lowbit.export.formats.packing import nibbles, scales_by_row
from lightning_lowbit.export.source import Source
from lightning_lowbit.export.weights import Weight, check
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.quant import Cast, Scale

_PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # whose format this is


def _tensors(weight: Weight, options: Options) -> dict[str, Tensor]:
    q = weight.quantized
    inputs = None if options.input_amaxes is None else torch.tensor(input_amax(weight, options))
    if q.cast.element == "e2m1":
        assert q.tensor_scale is not None
        given = {} if inputs is None else {"input_scale": inputs / 2688}
        return {
            "weight": nibbles(q.codes),
            "weight_scale": scales_by_row(q),
            "weight_scale_2": q.tensor_scale.clone(),
            **given,
        }
    return {
        "weight": q.codes.view(torch.float8_e4m3fn),
        "weight_scale": q.scales.reshape(()).float().clone(),
        "input_scale": torch.tensor(input_amax(weight, options)) / 448,
    }


def _obstacle(kind: str, name: str, layer: QuantizedLayer) -> str | None:
    if (why := obstacle(KINDS[kind], name, layer)) is not None:
        return why
    cast = layer.casts.fprop_w
    if cast is not None and kind == "fp8" and cast.scale.block != "tensor":
        return f"it takes FP8 with one scale of the tensor, and the weight has {cast}; take fp8"
    x = layer.casts.fprop_x
    if kind == "fp8" and (x is None or (x.element, x.scale.block) != ("e4m3", "tensor")):
        return f"engines would quantize its input to E4M3 with one scale, and the training had {x}; take fp8"
    return None


def _write(name: str, kind: str, source: Source, folder: Path, options: Options) -> list[Written]:
    check(source, {layer: _obstacle(kind, layer, source.layers[layer]) for layer in source.layers}, name)
    calibrated = options.input_amaxes is not None and all(map(takes_nvfp4, source.layers.values()))
    if not calibrated and kind != "fp8":
        options = replace(options, input_amaxes=None)
    algorithm = ("NVFP4" if calibrated else "W4A16_NVFP4") if kind != "fp8" else "FP8"
    shards, rows = Shards(folder), list[Written]()
    for weight in FORMATS[name].weights(source, options):
        size = shards.add({f"{weight.name}.{part}": tensor for part, tensor in _tensors(weight, options).items()})
        by = _inputs(weight, options) if calibrated or algorithm == "FP8" else None
        rows.append(row(weight, algorithm, size, by))
    shards.add_dense(source, {f"{layer}.weight" for layer in source.layers}, options.dtype)
    shards.close()
    linear = [each for each, module in source.model.named_modules() if isinstance(module, nn.Linear)]
    described = _described(algorithm, [each for each in linear if each not in source.layers])
    write_network(source, folder, options.dtype, {"quant_method": "modelopt", **described})
    of_file = {**described, "kv_cache_quant_algo": None, "exclude_modules": described["ignore"]}
    quantization = {key: of_file[key] for key in ("quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules")}
    write_json(folder / "hf_quant_config.json", {"producer": _PRODUCER, "quantization": quantization})
    return rows


def _inputs(weight: Weight, options: Options) -> Inputs:
    nvfp4 = Cast("e2m1", Scale("e4m3", 16, two_level=True))
    cast = nvfp4 if weight.cast.element == "e2m1" else Cast("e4m3", Scale("fp32", "tensor"))
    return Inputs(cast, input_amax(weight, options))


def _described(algorithm: str, ignored: list[str]) -> Mapping[str, Any]:
    group = None if algorithm == "FP8" else 16
    return {"quant_algo": algorithm, "group_size": group, "ignore": ignored, "producer": _PRODUCER}


FORMATS = {
    name: Format(
        name,
        "NVIDIA's Model Optimizer: TensorRT-LLM, vLLM, SGLang",
        partial(_obstacle, kind),
        partial(_write, name, kind),
        fused=True,
        own_cast=KINDS[kind].own_cast if name == "modelopt-nvfp4" else lambda dtype: None,
        programs=("TensorRT-LLM", "vLLM", "lightning_lowbit"),
    )
    for name, kind in {"modelopt-nvfp4": "nvfp4-w4a16", "modelopt-fp8": "fp8"}.items()
}
