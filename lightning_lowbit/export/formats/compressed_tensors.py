"""Folders in the format of compressed-tensors, which vLLM, SGLang, transformers and llama.cpp's converter load.

What they hold is listed in :mod:`lightning_lowbit.export.reading.layouts`. Layers of other classes than nn.Linear are
refused: engines find quantized layers by that class. Codes and scales are kept from the training. Engines make dynamic
scales of activations (MX formats, FP8 by tokens, int8 by tokens); static ones come from calibration.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_lowbit.export.folder import load_network
from lightning_lowbit.export.formats.base import (
    Encoded,
    Format,
    Inputs,
    NoClient,
    Options,
    by_layer,
    static_amax,
    unquantized_linears,
)
from lightning_lowbit.export.formats.packing import by_row, nibbles, stream, words
from lightning_lowbit.export.trained_model import is_language_model
from lightning_lowbit.export.weights import Weight, common_obstacle, divisor, has_second_level, weight_cast
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.quant import Cast, Scale

NVFP4 = Cast("e2m1", Scale("e4m3", 16, two_level=True))

_VERSION = "0.20.0"  # of compressed-tensors, whose files these are
_E4M3, _UINT8 = "torch.float8_e4m3fn", "torch.uint8"

# Engines' rounding of the exponents of activations, by the bits of elements.
_EXPONENTS = {4: "even", 6: "even", 8: "rceil"}

Scheme = dict[str, Any]


def _args(bits: int, kind: str, strategy: str, group: int | None = None, dynamic: Any = False, **others: Any) -> Scheme:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "group_size": group,
        "strategy": strategy,
        "block_structure": None,
        "dynamic": dynamic,
        "actorder": None,
        "observer": None if dynamic is True else "memoryless_minmax" if dynamic is False else "static_minmax",
        "observer_kwargs": {},
        **others,
    }


def _nvfp4(weight: Weight, options: Options, activations: bool) -> Encoded:
    q = weight.quantized
    assert q.tensor_scale is not None
    tensors = {
        "weight_packed": nibbles(q.codes),
        "weight_scale": by_row(q, q.scales),
        "weight_global_scale": divisor(q.tensor_scale).reshape(1),
    }
    args = partial(_args, 4, "float", "tensor_group", 16, scale_dtype=_E4M3, zp_dtype=_E4M3)
    if not activations:
        return Encoded(tensors, "nvfp4-pack-quantized", None, (args(), None))
    amax = input_amax(weight, options)
    tensors["input_global_scale"] = torch.tensor([2688.0 / amax])
    return Encoded(tensors, "nvfp4-pack-quantized", Inputs(NVFP4, amax), (args(), args(dynamic="local")))


def input_amax(weight: Weight, options: Options) -> float:
    """Returns the amax of a layer's input: over the calibration data, or else of delayed scaling."""
    amax = static_amax(weight.name, weight.layer, options)
    if amax is None:
        raise ValueError(
            "The format keeps a static scale for the activations of each layer, which takes data: give calibration "
            "text (--calibrate FILE), or a format that leaves activations in high precision, or scales them itself."
        )
    return max(amax, 1e-12)


def _mx(weight: Weight, options: Options) -> Encoded:
    q = weight.quantized
    bits, scale = q.cast.format.bits, q.scales.view(torch.uint8)
    args = partial(_args, bits, "float", "group", 32, scale_dtype=_UINT8, zp_dtype=_UINT8)
    if bits == 8:
        tensors, format = {"weight": q.codes.view(torch.float8_e4m3fn), "weight_scale": scale}, "mxfp8-quantized"
    else:
        packed = nibbles(q.codes) if bits == 4 else stream(q.codes, bits)
        tensors, format = {"weight_packed": packed, "weight_scale": scale}, f"mxfp{bits}-pack-quantized"
    engine = Cast(q.cast.element, Scale("e8m0", 32, _EXPONENTS[bits]))
    if weight.layer.casts.fprop_x != engine:
        return Encoded(tensors, format, None, (args(), None))
    return Encoded(tensors, format, Inputs(engine), (args(), args(dynamic=True)))


def _fp8(weight: Weight, options: Options) -> Encoded:
    q, block, inputs = weight.quantized, weight.cast.scale.block, weight.layer.casts.fprop_x
    scales, strategy = q.scales.float(), {"row": "channel", "tensor": "tensor"}.get(str(block), "block")
    scales = scales if strategy == "block" else scales.reshape(-1, *([1] if block == "row" else []))
    args = _args(8, "float", strategy, block_structure=[*block] if isinstance(block, tuple) else None)
    tensors = {"weight": q.codes.view(torch.float8_e4m3fn), "weight_scale": scales}
    by: Inputs | None = None
    scheme = None
    if inputs is not None and inputs.element == "e4m3":
        amax = static_amax(weight.name, weight.layer, options) if inputs.scale.block == "tensor" else None
        if inputs.scale.block == 128 and strategy == "block":
            by, scheme = Inputs(Cast("e4m3", Scale("fp32", 128))), _args(8, "float", "group", 128, dynamic=True)
        elif amax is None:
            by, scheme = Inputs(Cast("e4m3", Scale("fp32", "row"))), _args(8, "float", "token", dynamic=True)
        else:
            by, scheme = Inputs(Cast("e4m3", Scale("fp32", "tensor")), amax), _args(8, "float", "tensor")
            tensors["input_scale"] = torch.tensor([amax / 448.0])
    return Encoded(tensors, "float-quantized", by, (args, scheme))


def _integers(weight: Weight, options: Options) -> Encoded:
    q, inputs = weight.quantized, weight.layer.casts.fprop_x
    bits, block, rows = q.cast.format.bits, q.cast.scale.block, len(q.codes)
    scale = q.scales if block != "tensor" else q.scales.expand(rows, 1)
    strategy, group = ("group", int(block)) if isinstance(block, int) else ("channel", None)
    by_token = inputs is not None and (inputs.element, inputs.scale.block) == ("int8", "row")
    scheme = _args(8, "int", "token", dynamic=True) if by_token else None
    by = Inputs(Cast("int8", Scale("fp32", "row"))) if by_token else None
    if bits == 8 and by_token and strategy == "channel":
        tensors = {"weight": q.codes.view(torch.int8), "weight_scale": scale}
        return Encoded(tensors, "int-quantized", by, (_args(8, "int", strategy), scheme))
    offset = q.codes if q.zero_points is not None else q.elements().to(torch.int16) + 2 ** (bits - 1)
    shape = torch.tensor(q.codes.shape)
    tensors = {"weight_packed": words(offset, bits), "weight_scale": scale, "weight_shape": shape}
    if q.zero_points is not None:
        tensors["weight_zero_point"] = words(q.zero_points.t(), bits).t()
    args = _args(bits, "int", strategy, group, symmetric=q.zero_points is None)
    return Encoded(tensors, "pack-quantized", by, (args, scheme))


def is_nvfp4(cast: Cast | None) -> bool:
    if cast is None or cast.scale.block not in (16, (16, 16)):
        return False
    return (cast.element, cast.scale.format, cast.scale.two_level) == ("e2m1", "e4m3", True)


def _is_mx(element: str, cast: Cast) -> bool:
    return (cast.element, cast.scale.format, cast.scale.block) == (element, "e8m0", 32) and not has_second_level(cast)


def _is_fp8(cast: Cast) -> bool:
    return (cast.element, cast.scale.format) == ("e4m3", "fp32") and cast.scale.block in ("row", "tensor", (128, 128))


def _is_int(bits: int, cast: Cast) -> bool:
    elements = ("int2", "ternary") if bits == 2 else (f"int{bits}",)
    return cast.element in elements and not isinstance(cast.scale.block, tuple) and not has_second_level(cast)


def _obstacle(
    held: str, holds: Callable[[Cast], bool], activations: bool, name: str, layer: QuantizedLayer
) -> str | None:
    if (reason := common_obstacle(layer)) is not None:
        return reason
    cast, inputs = weight_cast(layer), layer.casts.fprop_x
    if not holds(cast):
        return f"it takes {held}, and the weight has {cast}"
    if not isinstance(layer, nn.Linear):
        return f"{type(layer).__name__} is no nn.Linear, by which engines find layers"
    if activations and not is_nvfp4(inputs):
        return f"engines would quantize its input to NVFP4, and the training had {inputs}: take nvfp4-w4a16"
    block, size = cast.scale.block, layer.in_features
    length = block[1] if isinstance(block, tuple) else block
    if isinstance(length, int) and size % length and cast.element != "e4m3":
        return f"its {size} in_features are no multiple of {length}"
    return None


def quantization_config(layers: Mapping[str, Encoded], ignored: Sequence[str]) -> dict[str, Any]:
    """Returns the description of layers in ``config.json``: a group for each scheme, and the ignored layers."""
    groups: dict[str, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(json.dumps([layer.format, *layer.scheme]), []).append(name)
    config_groups = {}
    for number, (text, names) in enumerate(groups.items()):
        format, weights, inputs = json.loads(text)
        config_groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(groups) == 1 else [f"re:{re.escape(name)}$" for name in names],
            "format": format,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
        }
    formats = {group["format"] for group in config_groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "version": _VERSION,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
    }


@torch.no_grad()
def _load(dtype: torch.dtype | None, folder: Path) -> nn.Module:
    """Returns the model as transformers computes it, with the activations that the configuration quantizes."""
    import compressed_tensors  # noqa: F401  of which transformers would tell later, and otherwise

    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    if not all(group["weights"]["symmetric"] for group in groups):
        raise NoClient("transformers with compressed-tensors 0.20 does not load zero points, as vLLM does")
    with redirect_stderr(StringIO()):  # bars of progress
        model = load_network(folder, dtype)
        if is_language_model(model):
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64))  # unpacks weights
    return model


def _format(
    name: str,
    held: str,
    holds: Callable[[Cast], bool],
    encode: Callable[[Weight, Options], Encoded],
    own_cast: Cast | None = None,
    fused: bool = False,
    activations: bool = False,
    dtype: torch.dtype | None = torch.bfloat16,
) -> Format:
    """Returns a format of this family. ``held`` says which casts of weights it ``holds``, with ``activations`` engines
    quantize inputs to NVFP4, too, and transformers computes in ``dtype`` (None: that of the folder), as
    compressed-tensors unpacks weights to bfloat16."""
    return Format(
        name,
        partial(_obstacle, held, holds, activations),
        by_layer(encode, lambda original, _, layers: quantization_config(layers, unquantized_linears(original))),
        partial(_load, dtype),
        fused=fused,
        own_cast=own_cast,
        rounds_scales=name.startswith("int"),
        computes_in=dtype if dtype == torch.bfloat16 else None,
        programs=("transformers, compressed-tensors", "vLLM", "lightning_lowbit"),
    )


def _mx_format(name: str, held: str, element: str) -> Format:
    return _format(name, held, partial(_is_mx, element), _mx, Cast(element, Scale("e8m0", 32)))


def _int_format(bits: int) -> Format:
    held = f"int{bits} in rows, groups or one tensor, with scales of one level in bf16, fp16 or fp32"
    own_cast = Cast(f"int{bits}", Scale("fp32", 32))
    return _format(f"int{bits}", held, partial(_is_int, bits), _integers, own_cast, dtype=None)


_HELD_NVFP4 = "NVFP4 (e2m1, E4M3 scales of 16 or 16x16, one scale of the tensor)"
_ALL = (
    _format("nvfp4-w4a16", _HELD_NVFP4, is_nvfp4, partial(_nvfp4, activations=False), NVFP4, fused=True),
    _format("nvfp4-w4a4", _HELD_NVFP4, is_nvfp4, partial(_nvfp4, activations=True), fused=True, activations=True),
    _mx_format("mxfp4", "MXFP4 (e2m1/e8m0:1x32, one level)", "e2m1"),
    _mx_format("mxfp6", "MXFP6 in E2M3 (e2m3/e8m0:1x32; engines hold no E3M2, nor a second level)", "e2m3"),
    _mx_format("mxfp8", "MXFP8 (e4m3/e8m0:1x32, one level)", "e4m3"),
    _format(
        "fp8",
        "E4M3 with float32 scales of the tensor, rows or tiles of 128x128",
        _is_fp8,
        _fp8,
        Cast("e4m3", Scale("fp32", "row")),
        fused=True,
        dtype=torch.float32,  # in which scales are as vLLM keeps them
    ),
    *map(_int_format, range(2, 9)),
)
FORMATS = {format.name: format for format in _ALL}
