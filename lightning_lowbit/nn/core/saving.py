"""What layers keep for the backward pass, such as their input, or its codes and scales; and operands made from it."""

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_lowbit.checks import choose
from lightning_lowbit.kernels import Packed, pack_operand, unpack_operand
from lightning_lowbit.nn.casts.plan import CONTRACTION, GEMM, INDEX, SHARED
from lightning_lowbit.nn.core import operands
from lightning_lowbit.nn.core.operands import PrequantizedWeight, Settings, record_statistics, scale_amax, signs_of
from lightning_lowbit.nn.core.source import Source
from lightning_lowbit.nn.native.operand import BlockOperand, unpacked_block_operand
from lightning_lowbit.quant import Cast, Operand
from lightning_lowbit.quant.packed import packed_bits

if TYPE_CHECKING:
    from lightning_lowbit.nn.casts.linear_casts import LinearCasts

SAVES = ("inputs", "codes")


def check_save(planned: "Mapping[str, LinearCasts]", save: str) -> None:
    """Raises a ``ValueError`` for an unknown ``save``, or for ``"codes"`` where layers need their input."""
    if choose("save", save, SAVES) == "inputs":
        return
    for name, casts in planned.items():
        if "fprop_x" in casts.surrogate:
            raise ValueError(
                f"save='codes' keeps no input, and the surrogate gradient of fprop_x needs it; got {name or 'casts'} "
                f"with {casts}. Leave the surrogate of fprop_x out, or take save='inputs'."
            )
    if planned and all(casts.plan.packed is None for casts in planned.values()):
        raise ValueError(
            "save='codes' keeps the quantized operand of wgrad, and none of these casts has one that can be packed: "
            "give wgrad_x a cast (or 'fprop'), without zero points or means, or take save='inputs'. Got "
            f"{next(iter(planned.values()))}."
        )


def saved_bits(casts: "LinearCasts", save: str, dtype: torch.dtype) -> float:
    """Bits per element of its input that a layer keeps for the backward pass.

    Examples:
        >>> saved_bits(LinearCasts.preset("nvfp4"), "codes", torch.bfloat16)
        4.5
    """
    if save == "codes" and casts.plan.packed is not None:
        return packed_bits(getattr(casts, casts.plan.packed))
    return 8.0 * dtype.itemsize


class Readers:
    """Which layers read one tensor together: where their codes would take more than the tensor, they keep that.

    One tensor serves all of its readers: with codes of 4.5 bits, four layers keep a bfloat16 tensor instead.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._input: weakref.ref[Tensor] | None = None
        self._layers: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Readers, ()  # a copy, or a pickled model, has layers of its own

    def pack(self, layer: Any, x: Tensor, dtype: torch.dtype) -> bool:
        """Whether a layer keeps codes of its input ``x``, which it reads in ``dtype``. Layers that read ``x`` together
        are known from their first pass on; bits of gradients do not depend on it."""
        shares = layer.casts.plan.packed == "wgrad_x" and x.dtype == dtype  # or else the tensor is a copy of its own
        if not shares or torch.compiler.is_compiling():
            return not (shares and layer.keeps_input)
        if self._input is None or self._input() is not x:
            self._input, self._layers = weakref.ref(x), []
        self._layers = [*(other for other in self._layers if other is not layer), layer]
        if sum(saved_bits(other.casts, "codes", dtype) for other in self._layers) > 8 * dtype.itemsize:
            for other in self._layers:
                other.keeps_input = True
        return not layer.keeps_input


# --- operands from what is kept -------------------------------------------------------------------------------------


def prequantized_weight(w: Tensor, prequantized: PrequantizedWeight, settings: Settings) -> Source:
    cast = settings.casts.fprop_w
    assert isinstance(cast, Cast)
    if cast.scale.source == "delayed":
        scale_amax("fprop_w", Source(w, prequantized.amax), settings)  # stages the amax
    dtype = settings.dtype_of("fprop_w", cast) or prequantized.dtype
    return Source(w.to(dtype), None, prequantized.factor, is_operand=True)


def frozen_weight(data: Tensor, source: torch.dtype, settings: Settings) -> Source:
    """The operand of a weight from its bytes."""
    assert settings.frozen is not None
    packed, shape = settings.frozen.packed(data), settings.frozen.shape
    return unpacked_source("fprop_w", packed, shape, source, settings)


def keeps_weight_operand(settings: Settings) -> bool:
    """Whether dgrad gets the forward pass's operand of the weight as it is."""
    plan = settings.casts.plan
    if settings.frozen is not None:
        return False
    if "dgrad_w" not in plan.kept and not settings.reuses("dgrad_w"):
        return False
    return not settings.recasts or settings.prequantized is not None or "fprop_w" in plan.altered


def weight_for_dgrad(kept: Operand, amax: Tensor | None, dtype: torch.dtype, settings: Settings) -> Operand:
    """What dgrad quantizes or takes as it is, from what the forward pass has kept of the weight."""
    if settings.frozen is not None:
        return settings.frozen.operand(kept.values, dtype, settings.dtype_of("dgrad_w", settings.frozen.cast))
    if not settings.recasts or keeps_weight_operand(settings):
        return kept
    w, requantizes = kept.values.to(dtype), "dgrad_w" in settings.casts.requantize
    takes_operand = "dgrad_w" in settings.casts.plan.kept or settings.reuses("dgrad_w")
    if not takes_operand or (settings.takes_codes("dgrad_w") and not requantizes):
        return Operand(w)
    quantized = operands.operand_of("fprop_w", Source(w, amax), settings.unrecorded())
    return quantized.decoded(dtype) if isinstance(quantized, BlockOperand) else quantized


def kept_source(name: str, operand: Operand, amax: Tensor | None, dtype: torch.dtype, settings: Settings) -> Source:
    """The source of an operand that the forward pass has kept: a tensor or a quantized operand, whose factor is
    multiplied in where it would vary along the contraction axis, or where the operand is quantized again."""
    values, factor = operand
    is_reused = name in SHARED and settings.reuses(name)
    is_quantized = isinstance(getattr(settings.casts, name), Cast) or settings.takes_codes(name)
    if (settings.frozen is not None and is_quantized and not is_reused) or name in settings.casts.requantize:
        return Source((values if factor is None else values.float() * factor).to(dtype))
    if factor is not None and factor.dim() > 0:
        values, factor = (values.float() * factor).to(torch.float32 if settings.exact else dtype), None
    return Source(values, amax, factor, is_operand=is_reused)


def pack_for_backward(name: str, source: Source, settings: Settings) -> Packed:
    """An operand as codes and scales, for the backward pass."""
    cast, sums = getattr(settings.casts, name), settings.operand_sums
    if GEMM[name] in settings.casts.hadamard:
        signs = signs_of(GEMM[name], settings, source.values.device)
        source = source.rotated(name, signs, getattr(settings.shards, name[-1]))
        source = source if sums is None else source.turned(name)
    amax, dim, shard = scale_amax(name, source, settings), CONTRACTION[name], settings.shard_of(name)
    packed = pack_operand(source.values, cast, dim, settings.key_of(name), amax, shard, source.rotation)
    if sums is not None:
        quantized = unpack_operand(packed, cast, dim, source.values.shape, source.values.dtype)
        record_statistics(sums[INDEX[name]], source.values, quantized, cast, dim, amax, shard)
    return packed


def unpacked_source(name: str, packed: Packed, shape: torch.Size, source: torch.dtype, settings: Settings) -> Source:
    cast, dim = getattr(settings.casts, name), CONTRACTION[name]
    if GEMM[name] in settings.casts.hadamard:  # padded to whole groups
        size = settings.casts.hadamard[GEMM[name]].size
        shape = torch.Size(n + -n % size if i == dim else n for i, n in enumerate(shape))
    if settings.native and settings.takes_codes(name):
        kind = settings.casts.plan.native_gemms[GEMM[name]]
        return Source(unpacked_block_operand(*packed, cast, kind, dim, shape), is_operand=True)
    operand = unpack_operand(packed, cast, dim, shape, source, settings.dtype_of(name, cast))
    return Source(operand.values, None, operand.factor, is_operand=True)
