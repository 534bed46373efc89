"""Adapters that are merged into their base, and the sum in few bits.

    W' = decode(W) + B A · alpha / rank       in float32
    exported: W' rounded to nearest, by the cast of the base where the format holds it, or else by the format's own

The base was rounded before the adapters were trained, and their sum is on no grid: it is rounded again, which nothing
was trained for. The parity report compares it with the unmerged model.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowbit.checks import some
from lightning_lowbit.export.formats.base import Format
from lightning_lowbit.export.reading.layouts import FLOATS
from lightning_lowbit.export.trained_model import TrainedModel, parameters_on_meta
from lightning_lowbit.export.weights import fused_groups, weight_cast, weights
from lightning_lowbit.nn import convert, unpack_frozen
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.quant import Cast


@torch.no_grad()
def merge_adapters(original: TrainedModel, format: Format, dtype: torch.dtype) -> TrainedModel:
    """A model whose adapters are merged, with weights in few bits that a format holds, and inputs in high precision.
    Engines may keep scales in the ``dtype`` of the files. A ``ValueError`` if the adapters cannot be merged, or the
    format holds neither the cast of the base nor has one."""
    trained: Any = original.model
    model, own_cast = _dense(trained), format.own_cast
    if own_cast is not None and format.rounds_scales:
        own_cast = own_cast.replace(scale={"format": FLOATS[dtype]})
    casts = {_name_in_base(name): _nearest(layer, own_cast) for name, layer in original.layers.items()}
    candidates = [casts] if casts else []
    if own_cast is not None:
        candidates.append(dict.fromkeys(casts or _linear_layers(trained.get_base_model()), own_cast))
    reasons = "the base was in high precision"
    for candidate in candidates:
        rounded = _quantized(original, model, candidate)
        obstacles = {name: format.obstacle(name, layer) for name, layer in rounded.layers.items()}
        if not (refused := {name: why for name, why in obstacles.items() if why is not None}):
            together = [
                names for names in fused_groups(rounded) if all(candidate[name].scale.needs_amax for name in names)
            ]
            return replace(rounded, shared=together if format.fused else ())
        reasons = f"{some(refused)}: {next(iter(refused.values()))}"
    raise ValueError(
        f"The format {format.name} has no cast for merged weights here ({reasons}). Take another one, such as "
        "gguf, or dequantized for a base in few bits."
    )


def rounding_errors(original: TrainedModel) -> Mapping[str, float]:
    """By layer, the largest change of a merged weight by its rounding to few bits."""
    return {
        weight.name: float((weight.quantized.dequantize() - weight.layer.weight_matrix().float()).abs().max())
        for weight in weights(original)
    }


def _dense(trained: Any) -> Any:
    """Returns a model of ``transformers`` with the sums of weights and adapters, in float32."""
    whole = unpack_frozen(copy.deepcopy(trained)).float()
    try:  # prompts cannot be merged, and sums may be infinite
        state: dict[str, Tensor] = whole.merge_and_unload(safe_merge=True).state_dict()
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"PEFT cannot merge these adapters into the weights: {str(error).rstrip('.')}. It merges adapters of "
            "matrices in a model of get_peft_model; evaluate others with restore."
        ) from error
    base = trained.get_base_model()
    with parameters_on_meta():
        model = type(base)(copy.deepcopy(base.config))
    model.load_state_dict({clean_name(name): tensor for name, tensor in state.items()}, assign=True)
    model.tie_weights()
    model.generation_config = base.generation_config
    return model.eval().requires_grad_(False)


def _nearest(layer: QuantizedLayer, own_cast: Cast | None) -> Cast:
    """The cast of a base's layer, rounding to nearest; with scales as the format keeps them, where it can have such."""
    cast = weight_cast(layer).replace(rounding="nearest")
    if own_cast is None or own_cast.element != cast.element:
        return cast
    try:
        return cast.replace(scale={"format": own_cast.scale.format})
    except ValueError:  # such as with zero points
        return cast


def _quantized(original: TrainedModel, model: Any, casts: Mapping[str, Cast]) -> TrainedModel:
    names = {re.escape(name): LinearCasts(fprop_w=cast) for name, cast in casts.items()}
    convert(model, next(iter(names.values())), only=[*names], overrides=names)
    layers = {clean_name(name): layer for name, layer in quantized_layers(model).items()}
    adapters = []
    for config in original.model.peft_config.values():  # type: ignore[operator]
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        settings = {name: getattr(config, name, None) for name in ("r", "lora_alpha")}
        adapters.append(" ".join([kind, *(f"{name}={value}" for name, value in settings.items() if value is not None)]))
    facts = {**original.facts, "adapters": f"merged: {'; '.join(adapters)}"}
    return TrainedModel(model, layers, torch.float32, model.config, facts, unmerged=original.model)


def _name_in_base(name: str) -> str:
    return re.sub(r"^base_model\.model\.", "", name).replace(".base_layer", "")


def _linear_layers(base: Any) -> list[str]:
    """Returns all linear layers of a base in high precision but its output layer."""
    head = base.get_output_embeddings()
    parts = {id(part) for part in head.modules()} if head is not None else set()
    linear = {name for name, part in base.named_modules() if isinstance(part, nn.Linear) and id(part) not in parts}
    names = [name for name in linear if ".lora_" not in name and "modules_to_save" not in name]
    return sorted({_name_in_base(clean_name(name)) for name in names})
