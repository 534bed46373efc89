"""Attention's two products as layers, and a call of ``F.scaled_dot_product_attention`` through them.

``qk`` is Q · Kᵀ and ``pv`` is P · V. Each has six casts, keys and statistics as any converted layer, and no weight.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_lowbit.nn.attention.function import Attention, ProductPass, QuantizedAttention
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import CONTRACTION, GEMM
from lightning_lowbit.nn.core.calls import keys_of_call
from lightning_lowbit.nn.core.gemm import no_autocast
from lightning_lowbit.nn.core.inputs import COMPUTED, check_inputs, refuse_dtypes
from lightning_lowbit.nn.layers.composite import PartLayer
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.rounding import mix_key

PRODUCTS_OF_ATTENTION = ("qk", "pv")

# Scores in a tile: 64 MiB of float32.
_TILE = 2**24

# Operands that are made of P or dS, tile by tile.
_TILED = {"qk": ("dgrad_g", "wgrad_g"), "pv": ("fprop_x", "wgrad_x")}


class ActivationProduct(PartLayer):
    """A product of two activations, one of attention's two."""

    kind = "attention"

    @property
    def device(self) -> torch.device:
        parameter = next(self.owner.parameters(), None)
        if parameter is not None:
            return parameter.device
        keys = self.lowbit.keys
        return torch.device("cpu") if keys is None else keys.device

    def native_kinds(self, *_: Any, **__: Any) -> dict[str, str]:
        """Returns none: they are emulated on all devices."""
        return {}

    def emulated_because(self, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, str]:
        gemms = self.full_casts.quantized_gemms
        return {", ".join(gemms): "attention's products have no native GEMM"} if gemms else {}

    def product_pass(self, dtype: torch.dtype, device: torch.device) -> ProductPass:
        pass_ = self._pass(dtype, keys_of_call(self), None).for_backward()
        return ProductPass(self._how(dtype, device), pass_, id(self))


def casts_of_attention(casts: Any) -> LinearCasts:
    """Makes casts as ``LinearCasts.of`` does; ``"fp8"`` is ``"fp8-current"``, since attention keeps no amaxes."""
    return LinearCasts.of("fp8-current" if isinstance(casts, str) and casts == "fp8" else casts)


def check_attention(name: str, casts: LinearCasts) -> LinearCasts:
    """Returns casts that attention's products can have; a ``ValueError`` for others."""
    for problem, remedy in _obstacles(casts):
        raise ValueError(f"attention: {name or 'its products'} cannot have {problem}; got {casts}. {remedy}")
    return casts


def _obstacles(casts: LinearCasts) -> Iterator[tuple[str, str]]:
    if casts.is_delayed:
        yield "delayed scaling", "Take scales with source='current', such as 'fp8-current'."
    for name in ("subtract_mean", "surrogate", "requantize", "smooth"):
        if getattr(casts, name):
            yield name, f"Leave {name} out, or take another preset, such as 'nvfp4' or 'fp8-current'."
    for operand in CONTRACTION:
        cast = getattr(casts, operand)
        if not isinstance(cast, Cast) or not isinstance(cast.scale.block, tuple):
            continue
        if not operand.endswith("_w"):
            yield f"tiles for {operand}", "Only w may have tiles: give the others blocks along one axis."
        elif cast.scale.statistic != "absmax":
            yield f"tiles with statistic={cast.scale.statistic!r}", "Take statistic='absmax'."


def attend(
    products: Mapping[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes ``F.scaled_dot_product_attention`` through the casts of ``products``, with its shapes and its masks.
    With dropout it draws one number of torch's generator, for the bits of the whole call.

    Raises:
        ValueError: nested tensors, DTensors, tensors of different dtypes, a mask of integers, or one beside
            ``is_causal``.
    """
    qk, pv = (products[name] for name in PRODUCTS_OF_ATTENTION)
    is_plain = (qk.casts.traits.is_empty and pv.casts.traits.is_empty) or check_inputs(qk, query, key, value)
    if is_plain or 0 in (query.numel(), key.numel(), value.numel()):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if query.dtype not in COMPUTED:
        refuse_dtypes(qk.name_in_model, query, key, value)
    _check_call(query, key, value, attn_mask, dropout_p, is_causal)
    bits = None if dropout_p == 0 else mix_key(torch.randint(2**62, (), device=query.device))
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"q, k and v have one dtype; got {query.dtype}, {key.dtype} and {value.dtype}.")
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))  # type: ignore[no-untyped-call]
    q, k, v = (x.expand(*lead, *x.shape[-2:]) if lead else x.unsqueeze(0) for x in (query, key, value))
    how = Attention(
        qk.product_pass(query.dtype, query.device),
        pv.product_pass(query.dtype, query.device),
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        is_causal,
        _queries_in_tile(qk.casts, pv.casts, query.shape[-2], math.prod(lead) * key.shape[-2]),
        dropout_p,
        bits,
    )
    mask = None if attn_mask is None else torch.atleast_2d(attn_mask)  # type: ignore[no-untyped-call]
    with no_autocast(device):
        o: Tensor = QuantizedAttention.apply(q, k, v, mask, how)[0]  # type: ignore[no-untyped-call]
    return o if lead else o.squeeze(0)


def _check_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool
) -> None:
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is at least 0 and less than 1; got {dropout_p}.")
    if any(isinstance(x, DTensor) for x in (query, key, value)):
        raise ValueError(
            "Quantized attention takes no DTensors: have the layers before it return local tensors (use_local_output), "
            "or leave such modules out with skip=[...]."
        )
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            "attn_mask is bool (True takes part) or floating point (added to the scores); got "
            f"{mask.dtype}. Write mask.bool() if 1 takes part."
        )
    if mask is not None and is_causal:
        raise ValueError("Give attn_mask or is_causal=True, not both: a mask may be causal itself.")


def _queries_in_tile(qk: LinearCasts, pv: LinearCasts, queries: int, size: int) -> int:
    """Returns how many queries are computed at a time, where each has ``size`` scores; all, where scales span them."""
    unit = 1
    for product, casts in (("qk", qk), ("pv", pv)):
        for operand in _TILED[product]:
            cast = getattr(casts, operand)
            if not isinstance(cast, Cast):
                continue
            if _spans_tiles(operand, cast, casts):
                return queries
            if CONTRACTION[operand] == 0 and isinstance(cast.scale.block, int):
                unit = math.lcm(unit, cast.scale.block)
    unit = max(unit, 16)
    return max(_TILE // max(size, 1) // unit, 1) * unit


def _spans_tiles(operand: str, cast: Cast, casts: LinearCasts) -> bool:
    scale = cast.scale
    if GEMM[operand] in casts.hadamard and (scale.needs_amax or CONTRACTION[operand] == 0):
        return True
    if CONTRACTION[operand] == 0 and "row" in (scale.block, scale.two_level):
        return True
    return scale.block == "tensor" and not scale.needs_amax
