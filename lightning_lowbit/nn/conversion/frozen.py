"""Base models of adapters: frozen weights as codes and scales, 4.5 bits per element in NVFP4 instead of 16 or 32."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_lowbit.checks import some
from lightning_lowbit.nn.casts.facts import explain_groups, group_by_reason, obstacle
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike, convert_more, plan
from lightning_lowbit.nn.core.saving import Frozen
from lightning_lowbit.nn.layers.classes import convertible
from lightning_lowbit.nn.layers.layer import QuantLinear, quantized_layers
from lightning_lowbit.patterns import clean_name

_Model = TypeVar("_Model", bound=nn.Module)

TAKES = {"product", "frozen codes", "stack", "annealed", "activations", "other dgrad_w", "no amax", "smooth tokens"}
TAKES |= {"surrogate"}


@torch.no_grad()
def pack_frozen(
    model: _Model,
    casts: CastsLike,
    *,
    skip: Iterable[str] = (),
    only: Iterable[str] | None = None,
    overrides: Mapping[str, CastsLike] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> _Model:
    """Quantizes the frozen weights of a model once, and keeps their codes and scales in place of the matrices.

    The forward pass gets the same bits as from the matrices; where ``dgrad_w`` has a cast of its own, it quantizes the
    quantized weight again (presets with ``"fprop"`` there, such as ``nvfp4-nvidia``, do not). A layer keeps its name,
    and its key in ``state_dict``, whose value is then uint8, 1-D. Loading takes such bytes, or a matrix.

    Args:
        model: its layers with weights of ``requires_grad=False`` are packed, others are left alone.
        casts: of these layers, as for :func:`lightning_lowbit.convert`; a plugin that trains the model must have the
            same ``fprop_w`` for them.
        skip, only, overrides: as for :func:`lightning_lowbit.convert`.
        dtype: in which weights are quantized, that of the computation; also of :func:`unpack_frozen`.

    Raises:
        ValueError: no weight is frozen, or the casts do not keep the weight as it is quantized once. The model is then
            unchanged.

    Examples:
        >>> model = pack_frozen(model.requires_grad_(False), "nvfp4-nvidia", skip=["lm_head"])
    """
    planned = plan(model, casts, skip, only, overrides)
    modules = convertible(model)
    weights: dict[str, Any] = {
        name: getattr(modules[name], "weight", next(modules[name].parameters(), None)) for name in planned
    }
    frozen = {name: casts for name, casts in planned.items() if not weights[name].requires_grad}
    if not frozen:
        raise ValueError(
            f"pack_frozen keeps weights with requires_grad=False as codes, and of {len(planned)} layers, e.g. "
            f"{some(planned)}, none is frozen. Call model.requires_grad_(False) first, and add adapters afterwards."
        )
    obstacles = {clean_name(name): _obstacle(modules[name], casts, dtype) for name, casts in frozen.items()}
    if refused := group_by_reason(obstacles):
        raise ValueError(
            f"pack_frozen cannot keep these weights as codes. {explain_groups(refused)}. Skip them, or give other "
            "casts."
        )
    convert_more(model, frozen)
    for name in frozen:
        layer: Any = model.get_submodule(name)
        if layer.lowbit.frozen is None:
            codes = Frozen(layer.full_casts.fprop_w, layer.weight.shape, dtype)
            keep_bytes(layer, codes, codes.pack(layer.weight))
    return model


@torch.no_grad()
def unpack_frozen(model: _Model) -> _Model:
    """Turns weights that are kept as codes into matrices of their quantized values, in place; returns the model.

    Needed before adapters are merged into them, or for casts with another ``fprop_w``.

    Examples:
        >>> model = pack_frozen(model.requires_grad_(False), "nvfp4", skip=["lm_head"])
        >>> model = unpack_frozen(model)
    """
    for layer in quantized_layers(model).values():
        if layer.lowbit.frozen is not None:
            weight = layer.weight_matrix()
            layer.lowbit.frozen = None
            layer.weight = nn.Parameter(weight, requires_grad=False)
    return model


def keep_bytes(layer: Any, frozen: Frozen, data: Tensor) -> None:
    """Replaces the weight of a layer by the bytes that ``frozen`` describes."""
    layer.weight = nn.Parameter(data, requires_grad=False)
    layer.lowbit.frozen = frozen
    layer.register_load_state_dict_pre_hook(_pack_matrix)


def _pack_matrix(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading: a matrix becomes bytes."""
    weight = state.get(f"{prefix}weight")
    frozen = layer.lowbit.frozen
    if frozen is not None and weight is not None and weight.shape == frozen.shape:
        state[f"{prefix}weight"] = frozen.pack(weight)


def _obstacle(layer: Any, casts: LinearCasts, dtype: torch.dtype) -> str | None:
    """Returns why a layer must have its weight as a matrix, in words; None if it need not."""
    if type(layer) not in (nn.Linear, QuantLinear):
        return f"{type(layer).__name__} does not keep its weight as nn.Linear does"
    frozen = layer.lowbit.frozen if isinstance(layer, QuantLinear) else None
    if frozen is not None and (frozen.cast, frozen.dtype) != (casts.fprop_w, dtype):
        return f"it is kept as codes of {frozen.cast} in {frozen.dtype} (unpack_frozen makes it a matrix)"
    return obstacle(casts, TAKES, layer)
