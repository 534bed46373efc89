"""A quantized matrix as bytes: what has to travel of it, and nothing else.

A shard of a matrix that is cut along its rows becomes one row of bytes, and all shards the rows of a matrix of bytes:

    codes      [rows, columns], as many to a byte as fit, the first one in the lowest bits
    scales     one per block or row, in their storage format; that of a tensor is known wherever its statistic is

    E2M1 in blocks of 16 with E4M3 scales   4.5 bits per element          E4M3 with one scale                     8
    ternary with one scale                  2                             int4 in blocks of 128 with fp32 scales  4.25
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.formats import Format, table
from lightning_lowbit.quant.blocks import from_blocks, scales_view, tile_of, to_blocks
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import has_factor, is_rounded
from lightning_lowbit.quant.scaling import make_scales, round_blocks, rounding_key, stored_scales
from lightning_lowbit.quant.shard import Shard


def pack(
    x: Tensor, cast: Cast, key: Tensor | None, amax: Tensor | None, mean: Tensor | None, shard: Shard
) -> tuple[Tensor, Tensor]:
    """Quantizes a shard of a matrix as :func:`lightning_lowbit.quant.quantize_operand` does along its columns.

    Nothing is communicated: what depends on other shards is given.

    Args:
        x: ``[rows, columns]``, cut along the rows, in the dtype of the computation.
        cast: how; ``cast.scale.statistic`` is none that has zero points (``"minmax"``).
        key: of stochastic rounding, or None.
        amax: float32, 0-d: of the global matrix, where ``cast.scale.needs_amax``.
        mean: float32, 0-d: mean|x| of the global matrix, where its one scale is made of that.
        shard: which one it is.

    Returns:
        uint8 ``[bytes]``, as many for all shards of one shape; and the scale of the global matrix, float32, 0-d.

    Raises:
        ValueError: a shard boundary splits a block, or stochastic rounding has no key.
    """
    tile = tile_of(cast, 1, 2)
    scaled, key = make_scales(x, cast, tile, amax, shard, mean), rounding_key(cast, key, x.device)
    offset = None if key is None else shard.offset(x.shape, tile, x.device)
    elements = round_blocks(*scaled, key, offset, cast=cast, scaled=False, dtype=torch.float32)
    codes = _join(_encode(from_blocks(elements, x.shape, tile), cast.format).flatten(), cast.format)
    scales = stored_scales(scaled.scales, cast)
    if cast.scale.block == "tensor":
        return codes, (scales * scaled.decode).reshape(())
    return torch.cat([codes, _encode(scales.flatten(), cast.scale.storage)]), scaled.decode


def unpack_(out: Tensor, data: Tensor, factor: Tensor, cast: Cast, dtype: torch.dtype) -> Tensor | None:
    """Writes the values of an operand, see :class:`lightning_lowbit.quant.Operand`.

    Args:
        out: ``[shards * rows, columns]``, contiguous, in a dtype that holds the values exactly.
        data: uint8 ``[shards, bytes]``, of :func:`pack`.
        factor: the scale of the global matrix, likewise.
        cast: with which they were packed.
        dtype: of what was packed, to which the values are rounded where the cast says so.

    Returns:
        The factor of the operand: float32, 0-d, or ``[shards * rows, 1]`` for scales per row; None for 1.
    """
    size = out.numel() // len(data)
    codes, scales = data.tensor_split([-(-size // _per_byte(cast.format))], 1)
    elements = _split(codes, cast.format)[:, :size].reshape(out.shape)
    if cast.scale.per_block:
        tile, stored = tile_of(cast, 1, 2), _decode(scales, cast.scale.storage)
        blocks = to_blocks(elements, tile)
        values = from_blocks(blocks * scales_view(stored, blocks, tile), out.shape, tile)
        out.copy_(values.to(dtype) if is_rounded(dtype, cast) else values)
    else:
        out.copy_(elements)
        if cast.scale.block == "row":
            factor = _decode(scales, cast.scale.storage).reshape(-1, 1) * factor
    return factor if has_factor(cast) else None


def _per_byte(format: Format) -> int:
    return 8 // format.bits


def _encode(values: Tensor, format: Format) -> Tensor:
    """Bytes of values on a grid; with torch's own dtypes -0 and NaN, too, which in others scales carry."""
    return format.encode(values) if format.dtype is None else values.to(format.dtype).view(torch.uint8)


def _decode(data: Tensor, format: Format) -> Tensor:
    """Inverse of :func:`_encode`: float32."""
    return format.decode(data) if format.dtype is None else data.contiguous().view(format.dtype).float()


def _join(codes: Tensor, format: Format) -> Tensor:
    """Bytes ``[⌈n / k⌉]`` of n codes, k in each."""
    count = _per_byte(format)
    joined, *others = F.pad(codes, (0, -len(codes) % count)).view(-1, count).unbind(1)
    for place, other in enumerate(others, 1):
        joined = joined | other << place * format.bits
    return joined


def _split(data: Tensor, format: Format) -> Tensor:
    """The elements of bytes ``[shards, bytes]``: float32 ``[shards, bytes * k]``."""
    if format.dtype is not None:
        return _decode(data, format)
    # One look-up for all codes of a byte, with an index of half its size.
    return _levels(format, data.device).index_select(0, data.flatten().int()).view(len(data), -1)


@cache
@torch.inference_mode(False)  # it outlives an evaluation
def _levels(format: Format, device: torch.device) -> Tensor:
    """float32 ``[256, k]``: what the codes in a byte stand for."""
    shifts = torch.arange(_per_byte(format), device=device) * format.bits
    codes = torch.arange(256, device=device)[:, None] >> shifts & 2**format.bits - 1
    return table(format, device)[codes]
