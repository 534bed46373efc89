"""A quantized matrix as bytes, for communication and for tensors that wait for the backward pass.

A matrix becomes one row of bytes: its codes, as many to a byte as fit, the first one in the lowest bits; then the
scales of blocks or rows in their storage format. E2M1 in blocks of 16 with E4M3 scales takes 4.5 bits per element,
ternary with one scale 2. A shard of a matrix that is cut along its rows becomes a row of its own.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit._torch.devices import lacks
from lightning_lowbit.formats import Format, table
from lightning_lowbit.quant.blocks import ALL, from_blocks, scales_view, tile_of, to_blocks
from lightning_lowbit.quant.call import CastCall, factor_shape, has_factor, is_rounded
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.scaling import round_matrix
from lightning_lowbit.quant.shard import Shard


class Packed(NamedTuple):
    """An operand as bytes: ``data``, uint8 ``[bytes]``, and ``factor``, float32, of the matrix, 0-d, or of its rows."""

    data: Tensor
    factor: Tensor


def empty_packed(x: Tensor, call: CastCall) -> Packed:
    """Memory for the packed operand of a matrix."""
    shape, cast = call.shape(x), call.cast
    data = x.new_empty(packed_bytes(shape[0], shape[1], cast, call.dim), dtype=torch.uint8)
    factors = factor_shape(shape, cast, call.dim) if cast.scale.two_level == "row" else ()
    return Packed(data, x.new_empty(factors, dtype=torch.float32))


def packing_obstacle(cast: Cast) -> str | None:
    """Returns why a cast has no packed form, in words; None where it has one."""
    if cast.scale.statistic == "minmax":
        return "its zero points are not packed"
    if cast.scale.source == "delayed" and not cast.scale.per_block and cast.format.dtype is None:
        return f"{cast.element} has no code for NaN, which a delayed scale would not show"
    return None


def packed_bits(cast: Cast) -> float:
    """Bits per element of a packed matrix, without scales per row or tensor."""
    per_block = cast.scale.per_block
    block = math.prod(cast.scale.block) if isinstance(cast.scale.block, tuple) else cast.scale.block
    scale = 8 * _scale_bytes(cast) / int(block) if per_block else 0.0
    return 8 / per_byte(cast.format) + scale


def pack(
    x: Tensor,
    cast: Cast,
    key: Tensor | None,
    amax: Tensor | None,
    mean: Tensor | None = None,
    shard: Shard | None = None,
    dim: int = 1,
) -> Packed:
    """Quantizes a matrix ``[rows, columns]``, or a shard, as :func:`lightning_lowbit.quant.quantize_operand` does along
    ``dim``, and packs it. Casts with a :func:`packing_obstacle` are not supported.

    ``amax`` and ``mean`` (of |x|) describe the global matrix; None measures them.
    """
    call = CastCall(cast, dim, key, amax, shard=shard)
    scaled, elements = round_matrix(x, call, mean, scaled=False, dtype=torch.float32)
    scales = scaled.stored(cast)
    data = assembled(elements, scales, cast)
    if cast.scale.block == "tensor":
        return Packed(data, (scales * scaled.decode).reshape(()))
    return Packed(data, scaled.factor(x.shape, tile_of(cast, dim, 2)))


def assembled(elements: Tensor, scales: Tensor, cast: Cast) -> Tensor:
    """Returns the bytes of a matrix from its elements, float32 ``[rows, columns]`` on the grid, and the scales of its
    blocks or rows, float32, in their order; a scale of the tensor is left out."""
    codes = _join(_encode(elements, cast.format).flatten(), cast.format)
    return codes if cast.scale.block == "tensor" else torch.cat([codes, _encode(scales.flatten(), cast.scale.storage)])


def unpack_(out: Tensor, data: Tensor, factor: Tensor, cast: Cast, dtype: torch.dtype, dim: int = 1) -> Tensor | None:
    """Writes the values of an :class:`lightning_lowbit.quant.Operand` to ``out``, and returns its factor, None for 1.

    ``out`` is ``[shards * rows, columns]``, contiguous, in a dtype that holds the values exactly. ``data``, uint8
    ``[shards, bytes]``, and ``factor`` come from :func:`pack`; ``dtype`` is that of the packed tensor. Several shards
    have blocks along the columns.
    """
    size = out.numel() // len(data)
    codes, scales = data.tensor_split([-(-size // per_byte(cast.format))], 1)
    elements = _split(codes, cast.format)[:, :size].reshape(out.shape)
    if cast.scale.per_block:
        tile, stored = tile_of(cast, dim, 2), _decode(scales, cast.scale.storage)
        blocks = to_blocks(elements, tile)
        values = from_blocks(blocks * scales_view(stored, blocks, tile), out.shape, tile)
        out.copy_(values.to(dtype) if is_rounded(dtype, cast) else values)
    else:
        out.copy_(elements)
    return unpacked_factor(data, factor, cast, size, dim)


def unpacked_factor(data: Tensor, factor: Tensor, cast: Cast, size: int, dim: int = 1) -> Tensor | None:
    """Returns the factor of :func:`unpack_`, from shards of ``size`` elements."""
    if cast.scale.block == "row":
        scales = _decode(data[:, -(-size // per_byte(cast.format)) :], cast.scale.storage)
        return scales.reshape((1, -1) if dim == 0 else (-1, 1)) * factor
    return factor if has_factor(cast) else None


def unpacked_codes(data: Tensor, cast: Cast, size: int) -> tuple[Tensor, Tensor]:
    """Returns the codes of a packed matrix of ``size`` elements, uint8 or in the dtype of its elements, and the scales
    of its blocks, float32, both flat."""
    count, bits = per_byte(cast.format), cast.format.bits
    codes, scales = data.tensor_split([-(-size // count)])
    if count > 1:
        shifts = torch.arange(count, dtype=torch.uint8, device=data.device) * bits
        codes = (codes[:, None] >> shifts & 2**bits - 1).flatten()[:size]
    elements = codes if cast.format.dtype is None else codes.clone().view(cast.format.dtype)
    return elements, _decode(scales, cast.scale.storage)


def packed_bytes(rows: int, columns: int, cast: Cast, dim: int) -> int:
    codes = -(-rows * columns // per_byte(cast.format))
    if cast.scale.block == "tensor":
        return codes
    down, across = tile_of(cast, dim, 2)
    blocks = (1 if down == ALL else -(-rows // down)) * (1 if across == ALL else -(-columns // across))
    return codes + blocks * _scale_bytes(cast)


def per_byte(format: Format) -> int:
    return 8 // format.bits


def _scale_bytes(cast: Cast) -> int:
    return -(-cast.scale.storage.bits // 8)


def _encode(values: Tensor, format: Format) -> Tensor:
    """Bytes of values on a grid. Torch's own dtypes keep -0 and NaN; with other elements the scales carry NaN."""
    if format.dtype is None or lacks(values.device, format.dtype):
        return format.encode(values)
    return values.to(format.dtype).view(torch.uint8)


def _decode(data: Tensor, format: Format) -> Tensor:
    """Inverse of :func:`_encode`: float32."""
    if format.dtype is None or lacks(data.device, format.dtype):
        return format.decode(data)
    aligned = data.contiguous() if format.dtype.itemsize == 1 else data.clone(memory_format=torch.contiguous_format)
    return aligned.view(format.dtype).float()


def _join(codes: Tensor, format: Format) -> Tensor:
    count = per_byte(format)
    if count > 1:
        codes = codes & 2**format.bits - 1  # NaN may have any code
    joined, *others = F.pad(codes, (0, -len(codes) % count)).view(-1, count).unbind(1)
    for place, other in enumerate(others, 1):
        joined = joined | other << place * format.bits
    return joined


def _split(data: Tensor, format: Format) -> Tensor:
    """Splits bytes ``[shards, bytes]`` into elements, float32 ``[shards, bytes * k]``."""
    if format.dtype is not None:
        return _decode(data, format)
    # One look-up for all codes of a byte, with an int32 index, half the size of int64.
    return _levels(format, data.device).index_select(0, data.flatten().int()).view(len(data), -1)


@cache
@torch.inference_mode(False)  # it outlives an evaluation
def _levels(format: Format, device: torch.device) -> Tensor:
    """Returns float32 ``[256, k]``: the k values that each byte holds."""
    shifts = torch.arange(per_byte(format), device=device) * format.bits
    codes = torch.arange(256, device=device)[:, None] >> shifts & 2**format.bits - 1
    return table(format, device)[codes]
