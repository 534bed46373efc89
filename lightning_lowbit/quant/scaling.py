"""Scales of blocks, and elements rounded in units of them.

A is the amax of the tensor and b that of a block. All values are float32. The order of operations decides the last bit,
and is Transformer Engine's:

    S = top * element.max / A                    encode scale of the tensor, a normal float32; 1 without a second level
    s = scale of the block, below                stored
    e = min(1 / (s * (1/S)), FLT_MAX)            the factor of elements; with a prescale p, p / s
    value = code * (s * (1/S))                   with a prescale code * (s / p), with a zero point (code - z) * s

    ExMy    s = round(min(b * (S * fl(1 / element.max)), scale.max))
    BF16    s = round(b / element.max * S); in FP16 at least 2^-14, its smallest normal number, unless b is 0
    4/6     s = round(min((b / 6) * S * m, scale.max)) with m = 1 or 6/4, the one with the smaller error in the block
    E8M0    s = 2^(k - floor(log2 element.max)) with b * S = 2^k * m, and one more where the rule rounds up
    fp32    s = 1/e, and elements are multiplied by e itself: element.max * 2^-margin / b, 1 / mean|x|, or
            (2^bits - 1) / (max - min) with z = round(-min * factor * e). The denominator is at least epsilon, and is
            then multiplied by factor

With ``two_level="row"``, A and S belong to a row. With a correction (MS-EDEN, arXiv 2601.22813, section 4), elements
are rounded with s, and decode with another scale, for which the errors of a group of blocks cancel on average:

    S = top * element.max / (factor * A)              s is 1 where it would be 0
    c = sum (s y)^2 / sum s y * s code, y = x * e     over the group; 1 where the denominator is 0
    value = code * (s' * (1/S))                       s' = round(s * c), stochastically

A block whose s underflows to 0 decodes to 0. Where A is 0 or not finite, S is 1; where b is 0, an fp32 e is 1. A block
with a NaN or an infinity gets s = NaN and decodes to NaN: an overflow never becomes a finite number.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_lowbit.compilation import compiled
from lightning_lowbit.quant.blocks import (
    Tile,
    block_dims,
    element_index,
    elements_per_block,
    from_blocks,
    tile_of,
    to_blocks,
)
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.rounding import KEYS, mix_key, round_nearest, round_stochastic, uniform, uniform_by_fours
from lightning_lowbit.quant.scales import (
    block_amax,
    block_ends,
    block_range,
    block_scales,
    block_sum,
    corrected_scales,
    encode_factor,
    four_over_six_scales,
    inverse,
    scales_of,
    stored_scales,
    tensor_encode_scale,
    zero_points,
)
from lightning_lowbit.quant.shard import Shard, amax_of

_SALT = 0x5363616C  # separates the bits of scales from those of elements, which share the key


class Scaled(NamedTuple):
    """A blocked matrix and its scales, float32, in the symbols above.

    ``scales`` holds s (e for fp32 scales), ``zeros`` z and ``corrected`` s', or None, with the size 1 along the
    dimensions of a block. ``decode`` is 1/S, or 1/p with a prescale: 0-d, or for S of rows like ``scales``.
    """

    blocks: Tensor
    scales: Tensor
    decode: Tensor
    zeros: Tensor | None = None
    corrected: Tensor | None = None

    def stored(self, cast: Cast) -> Tensor:
        """Returns the block scales that elements decode with."""
        return stored_scales(self.scales, cast) if self.corrected is None else self.corrected

    def factor(self, shape: torch.Size, tile: Tile) -> Tensor:
        """1/S of a matrix of this shape: 0-d, or of its rows ``[rows, 1]``, or of its columns ``[1, columns]``."""
        if self.decode.dim() == 0:
            return self.decode
        if tile[1] == 1:
            return self.decode.reshape(1, shape[1])
        return self.decode.reshape(shape[0], -1)[:, :1] if shape.numel() else self.decode.new_ones(shape[0], 1)


def round_matrix(
    x: Tensor,
    call: CastCall,
    mean: Tensor | None = None,
    rounding: Callable[..., Tensor] | None = None,
    **static: object,
) -> tuple[Scaled, Tensor]:
    """Returns the scales of a matrix ``[rows, columns]``, as :func:`make_scales` makes them, and its rounded elements.

    ``rounding`` rounds a blocked view, by default as :func:`round_blocks`; ``static`` are its keyword arguments. A
    ``ValueError`` for a missing or wrong key.
    """
    call = call._replace(key=rounding_key(call.cast, call.key, x.device))
    scaled = make_scales(x, call, mean)
    offset = call.offset(x)
    offset = None if offset is None else offset[None]  # a dimension that is a constant of compiled code
    blocks = (rounding or round_blocks)(*scaled, call.key, offset, cast=call.cast, **static)
    return scaled, from_blocks(blocks, x.shape, tile_of(call.cast, call.dim, 2))


def make_scales(x: Tensor, call: CastCall, mean: Tensor | None = None) -> Scaled:
    """Cuts a matrix ``[rows, columns]`` into blocks and makes their scales.

    ``mean`` (of magnitudes) is of the global matrix, one element; None measures it. Scales that round stochastically
    round to nearest without a key. A ``ValueError`` if a shard boundary splits a block, or for an amax that the cast
    does not use.
    """
    cast, shard, scale = call.cast, call.shard, call.cast.scale
    tile = tile_of(cast, call.dim, 2)
    is_cut = shard is not None and shard.cuts(tile)
    if shard is not None and not is_cut:
        shard.check(x.shape, tile[shard.dim], "blocks of")
    amax = _tensor_amax(x, call)
    encode = decode = torch.ones((), device=x.device)
    if amax is not None and scale.two_level:
        encode = tensor_encode_scale(amax.float().reshape(()), cast)
        decode = inverse(encode)
    elif scale.prescale != 1:  # applied after the scales are made, which would otherwise shrink, too
        decode = inverse(encode * scale.prescale)

    blocks, zeros, corrected = to_blocks(x, tile), None, None
    dims = block_dims(blocks, tile)
    if scale.two_level == "row":
        encode = tensor_encode_scale(row_amax(x, blocks, tile, shard), cast)
        decode = inverse(encode)
    draws = None
    if call.key is not None and scale.rounding == "stochastic":
        whole = shard._replace(start=0) if shard is not None and is_cut else shard
        offset = None if whole is None else whole.offset(x.shape, tile, x.device)
        draws = uniform(element_index(blocks, offset, dims), mix_key(call.key ^ _SALT))  # by the first element of each
    known = amax if scale.block == "tensor" and amax is not None else mean
    if known is not None:
        scales = scales_of(known.float().reshape(1, 1), encode, cast, draws)
    elif scale.statistic == "absmax" and not is_cut:
        if scale.four_over_six is not None:
            scales = four_over_six_scales(blocks, encode, cast, dims)
        else:
            scales = block_scales(blocks, encode, draws if scale.correction is None else None, cast=cast, dims=dims)
    else:
        value, low = _block_statistic(x, blocks, tile, cast, shard)
        scales = scales_of(value, encode, cast, draws)
        zeros = None if low is None else zero_points(low, scales, cast)
    if scale.correction is not None:
        if shard is not None and shard.dim == dims[0] - blocks.dim() + 2:
            shard.check(x.shape, scale.correction, "corrected groups of")
        scales = torch.where(scales == 0, 1.0, scales)
        corrected = corrected_scales(blocks, scales, decode, cast, len(x) if tile[1] > 1 else None, draws)
    return Scaled(blocks, scales, decode, zeros, corrected)


def _tensor_amax(x: Tensor, call: CastCall) -> Tensor | None:
    """Returns the amax that scales the tensor: that of the call, or measured; None for a cast that needs none."""
    if call.amax is None:
        return amax_of(x, call.shard) if call.cast.scale.needs_amax else None
    if not call.cast.scale.needs_amax:
        raise ValueError(
            f"amax was given, but {call.cast} has no scale of the whole tensor's largest magnitude: use "
            "Scale(two_level=True), or block='tensor' with statistic='absmax'."
        )
    if not isinstance(call.amax, Tensor) or call.amax.numel() != 1:
        raise ValueError(f"amax is a tensor of one element, the largest magnitude; got {call.amax!r}.")
    return call.amax


def _block_statistic(
    x: Tensor, blocks: Tensor, tile: Tile, cast: Cast, shard: Shard | None
) -> tuple[Tensor, Tensor | None]:
    """Returns each block's statistic over all processes that hold parts of it, and the lower end of its range."""
    dims, statistic = block_dims(blocks, tile), cast.scale.statistic
    cut = shard if shard is not None and shard.cuts(tile) else None
    if statistic == "minmax":
        low, high = block_ends(blocks, dims)
        low, span = block_range(_reduced(low, ReduceOp.MIN, cut), _reduced(high, ReduceOp.MAX, cut))
        return span, low
    if statistic == "absmean":
        total = _reduced(block_sum(blocks, dims), ReduceOp.SUM, cut)
        shape = x.shape if shard is None else shard.global_shape(x.shape)
        return (total / elements_per_block(x, blocks, tile, shape)).float(), None
    return _reduced(block_amax(blocks, dims), ReduceOp.MAX, cut), None


def _reduced(part: Tensor, op: ReduceOp.RedOpType, shard: Shard | None) -> Tensor:
    return part if shard is None else shard.reduce(part, op)


def row_amax(x: Tensor, blocks: Tensor, tile: Tile, shard: Shard | None) -> Tensor:
    """Returns the amax of each block's row (with blocks along columns, its column): float32, one for each block."""
    along = 1 if tile[1] > 1 else 0
    amax = _reduced(block_amax(x, (along,)), ReduceOp.MAX, shard if shard is not None and shard.dim == along else None)
    if along == 0:
        return amax.unsqueeze(0)
    return amax.expand(len(x), len(blocks) // max(len(x), 1)).reshape(-1, 1)


def rounding_key(cast: Cast, key: Tensor | int | None, device: torch.device) -> Tensor | None:
    """Returns the key of a cast's random bits as int64, 0-d; None if it draws none; a ValueError if it is missing."""
    if not cast.draws:
        return None
    if key is None:
        raise ValueError(f"{cast} rounds stochastically and needs a key: quantize(x, cast, key=...). {KEYS}")
    if not isinstance(key, Tensor):
        key = torch.tensor(key, device=device)
    if key.dtype != torch.int64 or key.numel() != 1:
        raise ValueError(f"A key is an integer or an int64 tensor of one element; got {key!r}.")
    return key if key.dim() == 0 else key.reshape(())


@compiled
def round_blocks(
    blocks: Tensor,
    scales: Tensor,
    decode: Tensor,
    zeros: Tensor | None = None,
    corrected: Tensor | None = None,
    key: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    cast: Cast,
    scaled: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Rounds a blocked view, to elements times block scales if ``scaled``, else to elements alone.

    The first arguments are the fields of :class:`Scaled`; ``offset`` is :meth:`Shard.offset` as ``[1, 3]``, None for a
    whole matrix.
    """
    values = blocks.float()
    if cast.scale.block == "tensor":
        values = values + (values - values)  # makes infinities NaN: an amax from outside does not show them
    values = values * encode_factor(scales, decode, cast)
    if zeros is not None:  # the levels of the block start at -z
        values = torch.minimum(torch.maximum(values, -zeros), cast.grid.max - zeros)
    if key is None or cast.rounding == "nearest":
        elements = round_nearest(values, cast.grid)
    else:
        elements = round_stochastic(values, cast.grid, uniform_by_fours(element_index(blocks, offset), key))
    if not scaled:
        return elements.to(dtype)
    return (elements * (stored_scales(scales, cast) if corrected is None else corrected)).to(dtype)
