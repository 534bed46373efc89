"""A quantized matrix as bytes, for communication.

A shard of a matrix that is cut along its rows becomes one row of bytes: its codes, as many to a byte as fit, the first
one in the lowest bits; then the scales of blocks or rows in their storage format. E2M1 in blocks of 16 with E4M3 scales
takes 4.5 bits per element, ternary with one scale 2.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.formats import Format, table
from lightning_lowbit.quant.blocks import from_blocks, scales_view, tile_of, to_blocks
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import has_factor, is_rounded
from lightning_lowbit.quant.scaling import make_scales, round_blocks, rounding_key
from lightning_lowbit.quant.shard import Shard


def pack(
    x: Tensor, cast: Cast, key: Tensor | None, amax: Tensor | None, mean: Tensor | None, shard: Shard
) -> tuple[Tensor, Tensor]:
    """Quantizes a shard ``[rows, columns]``, cut along the rows, as :func:`lightning_lowbit.quant.quantize_operand`
    does along columns, without communication: ``amax`` and ``mean`` (of |x|) are those of the global matrix. Casts
    with zero points or with ``two_level="row"`` are not supported. Returns uint8 ``[bytes]`` and the scale of the
    global matrix, float32, 0-d."""
    tile = tile_of(cast, 1, 2)
    key = rounding_key(cast, key, x.device)
    scaled = make_scales(x, cast, tile, amax, shard, mean, key)
    offset = None if key is None else shard.offset(x.shape, tile, x.device)
    elements = round_blocks(*scaled, key, offset, cast=cast, scaled=False, dtype=torch.float32)
    codes = _join(_encode(from_blocks(elements, x.shape, tile), cast.format).flatten(), cast.format)
    scales = scaled.stored(cast)
    if cast.scale.block == "tensor":
        return codes, (scales * scaled.decode).reshape(())
    return torch.cat([codes, _encode(scales.flatten(), cast.scale.storage)]), scaled.decode


def unpack_(out: Tensor, data: Tensor, factor: Tensor, cast: Cast, dtype: torch.dtype) -> Tensor | None:
    """Writes the values of an :class:`lightning_lowbit.quant.Operand` to ``out``, and returns its factor, None for 1.

    ``out`` is ``[shards * rows, columns]``, contiguous, in a dtype that holds the values exactly. ``data``, uint8
    ``[shards, bytes]``, and ``factor`` come from :func:`pack`; ``dtype`` is that of the packed tensor.
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
    """Bytes of values on a grid. Torch's own dtypes keep -0 and NaN; with other elements the scales carry NaN."""
    return format.encode(values) if format.dtype is None else values.to(format.dtype).view(torch.uint8)


def _decode(data: Tensor, format: Format) -> Tensor:
    """Inverse of :func:`_encode`: float32."""
    return format.decode(data) if format.dtype is None else data.contiguous().view(format.dtype).float()


def _join(codes: Tensor, format: Format) -> Tensor:
    count = _per_byte(format)
    joined, *others = F.pad(codes, (0, -len(codes) % count)).view(-1, count).unbind(1)
    for place, other in enumerate(others, 1):
        joined = joined | other << place * format.bits
    return joined


def _split(data: Tensor, format: Format) -> Tensor:
    """The elements of bytes ``[shards, bytes]``: float32 ``[shards, bytes * k]``."""
    if format.dtype is not None:
        return _decode(data, format)
    # One look-up for all codes of a byte, with an int32 index, half the size of int64.
    return _levels(format, data.device).index_select(0, data.flatten().int()).view(len(data), -1)


@cache
@torch.inference_mode(False)  # it outlives an evaluation
def _levels(format: Format, device: torch.device) -> Tensor:
    """float32 ``[256, k]``: the k values that each byte holds."""
    shifts = torch.arange(_per_byte(format), device=device) * format.bits
    codes = torch.arange(256, device=device)[:, None] >> shifts & 2**format.bits - 1
    return table(format, device)[codes]
