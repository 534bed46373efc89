"""Scales of blocks, and elements rounded in units of them.

A is the amax of the tensor and b that of a block. All values are float32. The order of operations decides the last bit,
and is Transformer Engine's:

    S = top * element.max / A                    encode scale of the tensor, a normal float32; 1 without a second level
    s = scale of the block, below                stored
    e = min(1 / (s * (1/S)), FLT_MAX)            what elements are multiplied by; with a prescale p, p / s
    value = code * (s * (1/S))                   with a prescale code * (s / p), with a zero point (code - z) * s

    ExMy    s = round(min(b * (S * fl(1 / element.max)), scale.max))
    4/6     s = round(min((b / 6) * S * m, scale.max)) with m = 1 or 6/4, the one with the smaller error in the block
    E8M0    s = 2^(k - floor(log2 element.max)) with b * S = 2^k * m, and one more where the rule rounds up
    fp32    s = 1/e, and elements are multiplied by e itself: element.max * 2^-margin / b, 1 / mean|x|, or
            (2^bits - 1) / (max - min) with z = round(-min * factor * e). The denominator is at least epsilon, and is
            then multiplied by factor

A block whose s underflows to 0 decodes to 0. Where A is 0 or not finite, S is 1; where b is 0, an fp32 e is 1. A block
with a NaN or an infinity gets s = NaN and decodes to NaN: an overflow never becomes a finite number.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_lowbit.compilation import compiled
from lightning_lowbit.formats import Format
from lightning_lowbit.quant.blocks import Tile, block_dims, element_index, elements_per_block, to_blocks
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.rounding import round_nearest, round_stochastic, round_up, uniform
from lightning_lowbit.quant.shard import Shard, amax_of

_FLOAT32_MAX, _FLOAT32_TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_FLOAT32_LEAST = 2.0**-128 + 2.0**-149  # the smallest x for which 1/x is a finite float32


class Scaled(NamedTuple):
    """A blocked matrix and its scales, float32, in the symbols above.

    ``scales`` holds s (e for fp32 scales) and ``zeros`` z, or None, with the size 1 along the dimensions of a block.
    ``decode`` is 1/S, or 1/p with a prescale, 0-d.
    """

    blocks: Tensor
    scales: Tensor
    decode: Tensor
    zeros: Tensor | None = None


def make_scales(
    x: Tensor,
    cast: Cast,
    tile: Tile,
    amax: Tensor | None = None,
    shard: Shard | None = None,
    mean: Tensor | None = None,
) -> Scaled:
    """Cuts a matrix ``[rows, columns]`` into blocks and makes their scales. ``amax`` and ``mean`` (of |x|), of the
    global matrix, have one element; None measures what is needed.

    Raises:
        ValueError: a shard boundary splits a block, or ``amax`` is given for a cast that does not use it.
    """
    is_cut = shard is not None and shard.cuts(tile)
    reduce = shard.reduce if shard is not None and is_cut else _unreduced
    if shard is not None and not is_cut:
        shard.check(x.shape, tile[shard.dim], "blocks of")
    if amax is None:
        amax = amax_of(x, shard) if cast.scale.needs_amax else None
    elif not cast.scale.needs_amax:
        raise ValueError(
            f"amax was given, but {cast} has no scale of the whole tensor's largest magnitude: use "
            "Scale(two_level=True), or block='tensor' with statistic='absmax'."
        )
    elif not isinstance(amax, Tensor) or amax.numel() != 1:
        raise ValueError(f"amax is a tensor of one element, the largest magnitude; got {amax!r}.")
    encode = decode = torch.ones((), device=x.device)
    if amax is not None and cast.scale.two_level:
        encode = tensor_encode_scale(amax.float().reshape(()), cast)
        decode = torch.reciprocal(encode)
    elif cast.scale.prescale != 1:  # applied after the scales are made, which would otherwise shrink, too
        decode = torch.reciprocal(encode * cast.scale.prescale)

    blocks, zeros = to_blocks(x, tile), None
    dims = block_dims(blocks, tile)
    if cast.scale.statistic == "minmax":
        low, high = block_ends(blocks, dims)
        low, span = block_range(reduce(low, ReduceOp.MIN), reduce(high, ReduceOp.MAX))
        scales = scales_of(span, encode, cast)
        zeros = zero_points(low, scales, cast)
    elif mean is not None:
        scales = scales_of(mean.reshape(1, 1), encode, cast)
    elif cast.scale.statistic == "absmean":
        counts = elements_per_block(x, blocks, tile, x.shape if shard is None else shard.global_shape(x.shape))
        scales = scales_of((reduce(block_sum(blocks, dims), ReduceOp.SUM) / counts).float(), encode, cast)
    elif cast.scale.block == "tensor":
        assert amax is not None
        scales = scales_of(amax.float().reshape(1, 1), encode, cast)
    elif is_cut:
        scales = scales_of(reduce(block_amax(blocks, dims), ReduceOp.MAX), encode, cast)
    elif cast.scale.four_over_six is not None:
        scales = four_over_six_scales(blocks, encode, cast, dims)
    else:
        scales = block_scales(blocks, encode, cast=cast, dims=dims)
    return Scaled(blocks, scales, decode, zeros)


def _unreduced(values: Tensor, op: ReduceOp.RedOpType) -> Tensor:
    return values


def rounding_key(cast: Cast, key: Tensor | int | None, device: torch.device) -> Tensor | None:
    """The key of a cast's random bits as int64, 0-d; None for rounding to nearest; a ValueError if it is missing."""
    if cast.rounding == "nearest":
        return None
    if key is None:
        raise ValueError(
            f"{cast} rounds stochastically and needs a key: quantize(x, cast, key=...). In a layer, keys are "
            "set by the plugin, as in Trainer(plugins=[FP4Precision()]), or by lightning_lowbit.nn.LayerKeys in a loop "
            "of your own."
        )
    if not isinstance(key, Tensor):
        key = torch.tensor(key, device=device)
    if key.dtype != torch.int64 or key.numel() != 1:
        raise ValueError(f"A key is an integer or an int64 tensor of one element; got {key!r}.")
    return key.reshape(())


@compiled
def round_blocks(
    blocks: Tensor,
    scales: Tensor,
    decode: Tensor,
    zeros: Tensor | None = None,
    key: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    cast: Cast,
    scaled: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Rounds a blocked view, to elements times block scales if ``scaled``, else to elements alone.

    The first arguments are the fields of :class:`Scaled`; ``offset`` is :meth:`Shard.offset`, None for a whole matrix.
    """
    values = blocks.float()
    if cast.scale.block == "tensor":
        values = values + (values - values)  # makes infinities NaN: an amax from outside does not show them
    values = values * encode_factor(scales, decode, cast)
    if zeros is not None:  # the levels of the block start at -z
        values = torch.minimum(torch.maximum(values, -zeros), cast.grid.max - zeros)
    if key is None:
        elements = round_nearest(values, cast.grid)
    else:
        elements = round_stochastic(values, cast.grid, uniform(element_index(blocks, offset), key))
    return (elements * stored_scales(scales, cast) if scaled else elements).to(dtype)


# --- from statistics to scales ----------------------------------------------------------------------------------------


def tensor_encode_scale(amax: Tensor, cast: Cast) -> Tensor:
    """S above, with two levels: 0-d float32, from the amax of the tensor (0-d float32)."""
    scale = _divide(cast.scale.largest * cast.format.max, amax).clamp(_FLOAT32_TINY, _FLOAT32_MAX)
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def _divide(number: float, tensor: Tensor) -> Tensor:
    # tensor / tensor: torch computes number / tensor as number * (1 / tensor), which is off by one ulp in places
    return torch.div(torch.full_like(tensor, number), tensor)


def _divide_by(tensor: Tensor, number: float) -> Tensor:
    return torch.div(tensor, torch.full_like(tensor, number))


@compiled
def block_scales(blocks: Tensor, encode_scale: Tensor, *, cast: Cast, dims: tuple[int, ...]) -> Tensor:
    """s (for fp32 scales e) of a blocked view: float32, with the size 1 along ``dims``, those of a block."""
    return scales_of(block_amax(blocks, dims), encode_scale, cast)


def block_amax(blocks: Tensor, dims: tuple[int, ...]) -> Tensor:
    """max|x| over some dimensions, which keep the size 1: float32, 0 without elements."""
    # The maximum is taken in the input's dtype, exactly, before the few maxima are widened.
    if blocks.numel() == 0:  # which amax refuses
        return blocks.new_zeros([1 if i in dims else n for i, n in enumerate(blocks.shape)], dtype=torch.float32)
    return blocks.abs().amax(dims, keepdim=True).float()


def block_sum(blocks: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sums of magnitudes over some dimensions, which keep the size 1."""
    # float64, so that the order of summation (on a GPU, over ranks) does not decide the last bit of a mean.
    wide = torch.float32 if blocks.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    return blocks.abs().sum(dims, keepdim=True, dtype=wide)


def block_ends(blocks: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over some dimensions, which keep the size 1: float32, 0 without elements."""
    if blocks.numel() == 0:
        zero = block_amax(blocks, dims)
        return zero, zero
    return blocks.amin(dims, keepdim=True).float(), blocks.amax(dims, keepdim=True).float()


def block_range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The minima of :func:`block_ends`, and the spans (NaN where not finite) up to the maxima, with 0 in the range.
    Ends are clamped to half of float32's range, so that the span is finite; elements beyond saturate."""
    finite = low.isfinite() & high.isfinite()
    low, high = low.clamp(-_FLOAT32_MAX / 2, 0), high.clamp(0, _FLOAT32_MAX / 2)
    return low, torch.where(finite, high - low, torch.nan)


def zero_points(low: Tensor, scales: Tensor, cast: Cast) -> Tensor:
    """z from the minima of blocks and e: whole numbers in float32, from 0 to 2^bits - 1."""
    return round_nearest(-low * cast.scale.factor * scales, cast.grid)


def scales_of(amax: Tensor, encode_scale: Tensor, cast: Cast) -> Tensor:
    """s (for fp32 scales e) from the statistics of blocks, such as amaxes: float32, any shape."""
    if cast.scale.format == "fp32":
        amount = amax.clamp(min=cast.scale.epsilon) * cast.scale.factor
        scales = _divide(fp32_numerator(cast), amount).clamp(_FLOAT32_LEAST, _FLOAT32_MAX)
        if cast.scale.rounding == "power_of_two":
            exponent = binary_exponent(scales)[0]  # rounds e down, so that nothing saturates
            scales = power_of_two(exponent.clamp(min=-127))  # so that the reciprocal is a finite float32
        scales = torch.where(amount > 0, scales, 1.0)
    elif cast.scale.format == "e8m0":
        wanted = (amax * encode_scale).clamp(max=_FLOAT32_MAX)  # overflows if a given amax is far too small
        scales = _round_e8m0(wanted, cast.format, cast.scale.rounding)
    else:
        scales = _round_exmy(amax * (encode_scale * (torch.ones_like(encode_scale) / cast.format.max)), cast)
    return torch.where(torch.isfinite(amax), scales, torch.nan)


def fp32_numerator(cast: Cast) -> float:
    """What an fp32 scale divides by the statistic of a block."""
    if cast.scale.statistic == "absmean":
        return 1.0
    return cast.grid.max if cast.scale.statistic == "minmax" else cast.format.max * 2.0**-cast.scale.margin


def _round_exmy(wanted: Tensor, cast: Cast) -> Tensor:
    return (round_up if cast.scale.rounding == "up" else round_nearest)(wanted, cast.scale.storage)


def _round_e8m0(amax: Tensor, element: Format, rounding: str | None) -> Tensor:
    exponent, threshold = e8m0_rule(element, rounding)
    k, m = binary_exponent(amax)
    scale = k - exponent + (m >= threshold).to(torch.int32)
    return power_of_two(torch.where(amax > 0, scale, -127).clamp(-127, 127))


def e8m0_rule(element: Format, rounding: str | None) -> tuple[int, float]:
    """The exponent of ``element.max``, and the m from which the scale of an amax 2^k * m is one power of two larger."""
    fraction, exponent = math.frexp(element.max)
    top, exponent = 2 * fraction, exponent - 1  # element.max = top * 2^exponent
    digits = element.mantissa_bits - max(element.min_exponent - exponent, 0)  # of element.max, after the leading one
    threshold = {
        "floor": 2.0,  # never
        "even": 2 - 2.0 ** (-digits - 1),  # where m, rounded to that many digits, becomes 2
        "rceil": top + 2.0**-23,  # the first float32 above: where element.max would be exceeded
        "ceil": 1 + 2.0**-23,
    }
    return exponent, threshold[str(rounding)]


def binary_exponent(values: Tensor) -> tuple[Tensor, Tensor]:
    """k (int32) and m (float32, in [1, 2)) of positive float32 values 2^k * m."""
    mantissa, exponent = torch.frexp(values)
    return exponent - 1, mantissa * 2


def power_of_two(exponent: Tensor) -> Tensor:
    """Exact 2^exponent for int32 exponents from -149 to 127, made from its bits; below -126 it is subnormal."""
    normal, subnormal = (exponent + 127) << 23, 1 << (exponent + 149).clamp(0, 22)
    return torch.where(exponent >= -126, normal, subnormal).to(torch.int32).view(torch.float32)


def four_over_six_scales(blocks: Tensor, encode_scale: Tensor, cast: Cast, dims: tuple[int, ...]) -> Tensor:
    """:func:`block_scales` with 4/6, which chooses 6 where both errors are equal."""
    amax = block_amax(blocks, dims)
    wanted = _divide_by(amax, cast.format.max) * encode_scale
    six, four = _round_exmy(wanted, cast), _round_exmy(wanted * 1.5, cast)
    gain = _excess_error(blocks, four, six, torch.reciprocal(encode_scale), cast=cast)
    scales = torch.where(_sum_in_halves(gain, dims) < 0, four, six)
    return torch.where(torch.isfinite(amax), scales, torch.nan)


def _sum_in_halves(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sums over some dimensions, which keep the size 1, in one order everywhere: halves are added to each other."""
    for dim in dims:
        while (size := values.shape[dim]) > 1:
            half = 1 << (size - 1).bit_length() - 1  # the largest power of two below the size
            first, second = values.narrow(dim, 0, half), values.narrow(dim, half, size - half)
            added = first.narrow(dim, 0, size - half) + second
            values = torch.cat([added, first.narrow(dim, size - half, 2 * half - size)], dim)
    return values


@compiled
def _excess_error(blocks: Tensor, scales: Tensor, others: Tensor, decode_scale: Tensor, *, cast: Cast) -> Tensor:
    def error(scales: Tensor) -> Tensor:
        codes = round_nearest(blocks.float() * encode_factor(scales, decode_scale, cast), cast.format)
        difference = codes * (scales * decode_scale) - blocks.float()
        return difference.square() if cast.scale.four_over_six == "mse" else difference.abs()

    return error(scales) - error(others)


def encode_factor(scales: Tensor, decode_scale: Tensor, cast: Cast) -> Tensor:
    """e from the result of :func:`block_scales` (float32, any shape) and 1/S (0-d float32)."""
    if cast.scale.format == "fp32":
        return scales
    return torch.reciprocal(scales * decode_scale).clamp(max=_FLOAT32_MAX)


def stored_scales(scales: Tensor, cast: Cast) -> Tensor:
    """s from the result of :func:`block_scales`."""
    return torch.reciprocal(scales) if cast.scale.format == "fp32" else scales
