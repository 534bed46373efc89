"""Folders of ``transformers``' quantization method ``bitnet``: ternary weights, and inputs in int8 by tokens.

A layer ``[N, K]`` becomes ``weight``, uint8 ``[N/4, K]``: byte ``[r, k]`` holds, from the low bits up, the elements
``[r, k]``, ``[r + N/4, k]``, ``[r + 2N/4, k]`` and ``[r + 3N/4, k]``, each plus 1 in two bits. The loaded layer (linear
class ``bitlinear``) divides by ``weight_scale``, float32 ``[1]``:

    y = round(x · a) Wᵀ / (weight_scale · a)        a = 127 / max(amax of the token, 1e-5)
"""

import re
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowbit.export.folder import load_network
from lightning_lowbit.export.formats.base import Encoded, Format, Inputs, Options, by_layer, unquantized_linears
from lightning_lowbit.export.trained_model import TrainedModel
from lightning_lowbit.export.weights import Weight, common_obstacle, divisor
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.quant import Cast, Scale

_ELEMENTS = 4  # of a byte
_INPUTS = Cast("int8", Scale("fp32", "row", epsilon=1e-5))  # by which the loaded layer quantizes its input


def obstacle(name: str, layer: QuantizedLayer) -> str | None:
    """Returns why the method cannot hold a layer, in words; None if it can."""
    if (reason := common_obstacle(layer)) is not None:
        return reason
    if not isinstance(layer, nn.Linear) or type(layer).forward is not QuantizedLayer.forward:
        return f"{type(layer).__name__} is no nn.Linear, which bitnet replaces"
    weight, x = layer.casts.fprop_w, layer.casts.fprop_x
    if weight is None or weight.element != "ternary" or weight.scale.block != "tensor":
        return f"bitnet takes ternary weights with one scale of the tensor, and this one has {weight}"
    if x != _INPUTS:
        trained = f"by {x}" if x is not None else "not at all: take int2, or gguf"
        return f"bitnet quantizes inputs by {_INPUTS}, and the training {trained}"
    if layer.out_features % _ELEMENTS:
        return f"its {layer.out_features} out_features are no multiple of {_ELEMENTS}"
    return None


def tensors(weight: Weight) -> dict[str, Tensor]:
    """Returns the tensors of a layer, by the last part of their names."""
    packed, *quarters = weight.quantized.codes.chunk(_ELEMENTS)
    for i, codes in enumerate(quarters, 1):
        packed = packed | codes << 2 * i
    return {"weight": packed, "weight_scale": divisor(_scale(weight)).reshape(1)}


def error(weight: Weight, dtype: torch.dtype) -> float:
    """Returns the largest error of a weight in a model that is loaded in ``dtype``: its ``weight_scale`` is rounded. A
    ``ValueError`` where the dtype's range does not hold it."""
    scale = _scale(weight)
    rounded = divisor(scale).to(dtype).float().reciprocal()
    if not (rounded - scale).abs() <= torch.finfo(dtype).eps * scale:
        raise ValueError(
            f"The layers of bitnet divide by weight_scale in the dtype of the model, and {dtype} does not hold that of "
            f"{weight.name}, {float(divisor(scale)):.3g}: give --dtype bf16 or fp32."
        )
    return float((rounded - scale).abs())


def _scale(weight: Weight) -> Tensor:
    return weight.quantized.multipliers().reshape(())


def _shown(loaded: Any, weight: Weight) -> Tensor | None:
    """The elements of a loaded layer times the scale of the training; the layer's own divisor shows in its output."""
    from transformers.integrations.bitnet import unpack_weights

    packed = getattr(loaded, "weight", None)
    return unpack_weights(packed, torch.float32) * _scale(weight) if isinstance(packed, Tensor) else None


def _pattern(name: str, layers: Mapping[str, QuantizedLayer]) -> str:
    """Returns a name, as a regular expression where others begin or end with it."""
    is_ambiguous = any(layer.endswith(name) or re.match(rf"{name}(\.|$)", layer) for layer in layers)
    return f"^{re.escape(name)}$" if is_ambiguous else name


def _encode(weight: Weight, options: Options) -> Encoded:
    return Encoded(tensors(weight), "bitnet", Inputs(_INPUTS), error=error(weight, options.dtype))


def quantization_config(original: TrainedModel) -> dict[str, Any]:
    return {
        "quant_method": "bitnet",
        "linear_class": "bitlinear",
        "quantization_mode": "offline",
        "use_rms_norm": False,
        "rms_norm_eps": 1e-6,
        "modules_to_not_convert": [_pattern(name, original.layers) for name in unquantized_linears(original)],
    }


def _load(folder: Path) -> nn.Module:
    model: Any = load_network(folder)
    forward = model.forward

    @wraps(forward)
    def eager(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):  # its layers would be compiled, which takes a compiler
            return forward(*args, **kwargs)

    model.forward = eager
    return model


FORMATS = {
    "bitnet": Format(
        "bitnet",
        obstacle,
        by_layer(_encode, lambda original, *_: quantization_config(original)),
        _load,
        shown=_shown,
        programs=("transformers, accelerate", "lightning_lowbit"),
    )
}
