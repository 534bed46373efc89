"""An operand of a GEMM: ``elements * scales`` in the GEMM's dtype, with the tensor's scale as a factor."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.compilation import opaque
from lightning_lowbit.quant.blocks import from_blocks, tile_of
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.scales import encode_factor
from lightning_lowbit.quant.scaling import make_scales, round_blocks, rounding_key
from lightning_lowbit.quant.shard import Shard


class Operand(NamedTuple):
    """One operand of a GEMM: ``values`` ``[rows, columns]`` times ``factor``, which is float32, 0-d, ``[rows, 1]`` or
    ``[1, columns]``, or None for 1. It is constant along the contraction axis and therefore multiplies the result."""

    values: Tensor
    factor: Tensor | None = None

    def t(self) -> "Operand":
        factor = self.factor
        return Operand(self.values.t(), factor if factor is None or factor.dim() == 0 else factor.t())


def quantize_operand(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    shard: Shard | None = None,
) -> Operand:
    """Quantizes one operand of a GEMM to ``elements * scales``, with scales per row or tensor in the factor.

    Args:
        x: ``[rows, columns]`` in the GEMM's dtype.
        cast, dim, key, amax: as in :func:`lightning_lowbit.quantize`.
        dtype: of the values, which it must hold exactly: float32, or ``cast.grid.gemm_dtype`` for scales per row or
            tensor. None takes that of ``x`` if the cast fits bfloat16 or has ``round_to_bfloat16``, else float32.
        shard: the shard that ``x`` is; it gets the global matrix's scales and random bits. All processes that hold one
            must call this together. A ValueError if a shard boundary splits a block.
    """
    dtype, spec = dtype or operand_dtype(x.dtype, cast), None if shard is None else shard.spec
    values, factor = plain_operand(x, cast.spec, dim, key, amax, dtype, spec)
    return Operand(values, factor if has_factor(cast) else None)


def fake_operand(
    x: Tensor, spec: str, dim: int, key: Tensor | None, amax: Tensor | None, dtype: torch.dtype, shard: str | None
) -> tuple[Tensor, Tensor]:
    """Empty results of :func:`plain_operand`."""
    factor = x.new_empty(factor_shape(x, Cast.from_spec(spec), dim), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), factor


@opaque(fake_operand)
def plain_operand(
    x: Tensor, spec: str, dim: int, key: Tensor | None, amax: Tensor | None, dtype: torch.dtype, shard: str | None
) -> tuple[Tensor, Tensor]:
    """Values and factor of :func:`quantize_operand`, which has no factor where this one is without meaning."""
    cast, of_global = Cast.from_spec(spec), None if shard is None else Shard.from_spec(shard)
    tile = tile_of(cast, dim, x.dim())
    key = rounding_key(cast, key, x.device)
    scaled = make_scales(x, cast, tile, amax, of_global, key=key)
    offset = None if of_global is None or key is None else of_global.offset(x.shape, tile, x.device)
    rounded = x.dtype if is_rounded(x.dtype, cast) else dtype  # even if ``dtype`` is float32
    values = round_blocks(*scaled, key, offset, cast=cast, scaled=cast.scale.per_block, dtype=rounded)
    factor = scaled.factor(x.shape, tile)
    if not cast.scale.per_block:
        factor = (scaled.stored(cast) * factor).reshape(factor_shape(x, cast, dim))
    return from_blocks(values.to(dtype), x.shape, tile).contiguous(), factor


def blend(x: Tensor, quantized: Operand, share: Tensor, exact: bool = False) -> Operand:
    """``x + λ (q - x)``: an operand between high precision and its quantized values q (annealing).

    ``share`` is λ in [0, 1], 0-d float32. 0 gives ``x`` to the bit where q is finite; 1 gives q, rounded once to the
    dtype of ``x``. With ``exact`` the values are float32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32) if exact else x.dtype
    return Operand(_blend(x, quantized.values, quantized.factor, share, dtype))


@opaque(lambda x, values, factor, share, dtype: x.new_empty(x.shape, dtype=dtype))
def _blend(x: Tensor, values: Tensor, factor: Tensor | None, share: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x, values = x.to(wide), values.to(wide)
    return torch.lerp(x, values if factor is None else values * factor, share.to(wide)).to(dtype).contiguous()


def scaled_elements(x: Tensor, cast: Cast, dim: int, amax: Tensor | None = None, shard: Shard | None = None) -> Tensor:
    """Elements in units of their scales, before rounding: float32, the shape of ``x``."""
    tile = tile_of(cast, dim, x.dim())
    scaled = make_scales(x, cast, tile, amax, shard)
    factor = encode_factor(scaled.scales, scaled.decode, cast)
    return from_blocks(scaled.blocks.float() * factor, x.shape, tile)


def has_factor(cast: Cast) -> bool:
    return bool(cast.scale.two_level) or cast.scale.prescale != 1 or not cast.scale.per_block


def factor_shape(x: Tensor, cast: Cast, dim: int) -> tuple[int, ...]:
    """The shape of the factor of an operand: that of all scales that are not in its values."""
    if cast.scale.block != "row" and cast.scale.two_level != "row":
        return ()
    return (1, x.shape[1]) if dim in (0, -2) else (x.shape[0], 1)


def operand_dtype(dtype: torch.dtype, cast: Cast) -> torch.dtype:
    """The dtype of an operand's values, given that of the tensor; see :func:`quantize_operand`."""
    # float16 has the precision but not the range: codes * scales exceed 65504 for some scale formats.
    fits = cast.fits_bfloat16 and dtype != torch.float16
    return dtype if fits or is_rounded(dtype, cast) else torch.float32


def are_regular(draws: bool, needs_amax: bool, key: Tensor | None, amax: Tensor | None, device: torch.device) -> bool:
    """Whether a kernel takes a key and an amax: the plain code converts, or refuses, all others."""
    if draws and (key is None or key.dtype != torch.int64 or not _is_one(key, device)):
        return False
    return amax is None or (needs_amax and amax.dtype == torch.float32 and _is_one(amax, device))


def _is_one(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is one number on a device, whose memory has its sign."""
    return tensor.numel() == 1 and tensor.device == device and not tensor.is_neg()


def stands_alone(cast: Cast, dim: int, amax: Tensor | None, shard: Shard | None) -> bool:
    """Whether a process holds all that decides the scales of its shard: no reduction, and no split block or group."""
    if shard is None:
        return True
    tile = tile_of(cast, dim, 2)
    side = tile[shard.dim]
    if shard.cuts(tile) or (cast.scale.needs_amax and amax is None):
        return False
    if side > 1 and cast.scale.two_level == "row":
        return False
    return not shard.splits(cast.scale.correction or side if side > 1 else side)


def is_rounded(dtype: torch.dtype, cast: Cast) -> bool:
    """Whether operands are rounded to the dtype of the tensor that they are made from."""
    return cast.round_to_bfloat16 and cast.scale.per_block and dtype != torch.float16
