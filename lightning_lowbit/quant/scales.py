"""From statistics of blocks to scales, in the symbols of :mod:`lightning_lowbit.quant.scaling`.

Scales that round stochastically take draws, uniform in (0, 1), one for each; without draws they round to nearest.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit._torch.devices import frexp, power_of_two, wide_dtype
from lightning_lowbit.compilation import compiled
from lightning_lowbit.formats import Format
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.rounding import round_nearest, round_stochastic, round_up

_FLOAT32_MAX, _FLOAT32_TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_FLOAT32_LEAST = 2.0**-128 + 2.0**-149  # the smallest x for which 1/x is a finite float32


def tensor_encode_scale(amax: Tensor, cast: Cast) -> Tensor:
    """S, with two levels, from the amaxes of tensors or rows: float32, any shape."""
    scale = _divide(cast.scale.largest * cast.format.max / cast.scale.factor, amax).clamp(_FLOAT32_TINY, _FLOAT32_MAX)
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def _divide(number: float, tensor: Tensor) -> Tensor:
    # tensor / tensor: torch computes number / tensor as number * (1 / tensor), which is off by one ulp in places
    return torch.div(torch.full_like(tensor, number), tensor)


def inverse(tensor: Tensor) -> Tensor:
    """Returns 1 / x, rounded once; for GPUs torch 2.11 generates an approximate ``torch.reciprocal``."""
    return _divide(1.0, tensor)


def _divide_by(tensor: Tensor, number: float) -> Tensor:
    return torch.div(tensor, torch.full_like(tensor, number))


@compiled
def block_scales(
    blocks: Tensor, encode_scale: Tensor, draws: Tensor | None = None, *, cast: Cast, dims: tuple[int, ...]
) -> Tensor:
    """Returns s (for fp32 scales e) of a blocked view: float32, 1 along ``dims``, the dimensions of a block."""
    return scales_of(block_amax(blocks, dims), encode_scale, cast, draws)


def block_amax(blocks: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Returns max|x| over some dimensions, which keep the size 1: float32, 0 without elements."""
    # The maximum is taken in the input's dtype, exactly, before the few maxima are widened.
    if blocks.numel() == 0:  # which amax refuses
        return blocks.new_zeros([1 if i in dims else n for i, n in enumerate(blocks.shape)], dtype=torch.float32)
    return blocks.abs().amax(dims, keepdim=True).float()


def block_sum(blocks: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sums of magnitudes over some dimensions, which keep the size 1."""
    # float64, so that the order of summation (on a GPU, over ranks) does not decide the last bit of a mean.
    return blocks.abs().sum(dims, keepdim=True, dtype=wide_dtype(blocks.device))


def block_ends(blocks: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over some dimensions, which keep the size 1: float32, 0 without elements."""
    if blocks.numel() == 0:
        zero = block_amax(blocks, dims)
        return zero, zero
    return blocks.amin(dims, keepdim=True).float(), blocks.amax(dims, keepdim=True).float()


def block_range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the minima of :func:`block_ends`, and the spans (NaN where not finite) up to the maxima, with 0 in the
    range. Ends are clamped to half of float32's range, so that the span is finite; elements beyond saturate."""
    finite = low.isfinite() & high.isfinite()
    low, high = low.clamp(-_FLOAT32_MAX / 2, 0), high.clamp(0, _FLOAT32_MAX / 2)
    return low, torch.where(finite, high - low, torch.nan)


def zero_points(low: Tensor, scales: Tensor, cast: Cast) -> Tensor:
    """z from the minima of blocks and e: whole numbers in float32, from 0 to 2^bits - 1."""
    return round_nearest(-low * cast.scale.factor * scales, cast.grid)


def scales_of(amax: Tensor, encode_scale: Tensor, cast: Cast, draws: Tensor | None = None) -> Tensor:
    """Returns s (for fp32 scales e) from the statistics of blocks, such as amaxes: float32, any shape."""
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
    elif cast.scale.format in ("bf16", "fp16"):
        storage = cast.scale.storage
        scales = round_nearest(_divide_by(amax, cast.format.max) * encode_scale, storage)
        if cast.scale.format == "fp16":  # engines may flush subnormal numbers to 0
            scales = torch.where(amax > 0, scales.clamp(min=2.0**storage.min_exponent), scales)
    else:
        amount = amax if cast.scale.factor == 1 else amax * cast.scale.factor
        wanted = amount * (encode_scale * (torch.ones_like(encode_scale) / cast.format.max))
        scales = _round_exmy(wanted, cast, draws)
    return torch.where(torch.isfinite(amax), scales, torch.nan)


def fp32_numerator(cast: Cast) -> float:
    """Returns the number that is divided by the statistic of a block, for fp32 scales."""
    if cast.scale.statistic == "absmean":
        return 1.0
    return cast.grid.max if cast.scale.statistic == "minmax" else cast.format.max * 2.0**-cast.scale.margin


def _round_exmy(wanted: Tensor, cast: Cast, draws: Tensor | None = None) -> Tensor:
    if draws is not None:
        return round_stochastic(wanted, cast.scale.storage, draws)
    return (round_up if cast.scale.rounding == "up" else round_nearest)(wanted, cast.scale.storage)


def _round_e8m0(amax: Tensor, element: Format, rounding: str | None) -> Tensor:
    exponent, threshold = e8m0_rule(element, rounding)
    k, m = binary_exponent(amax)
    scale = k - exponent + (m >= threshold).to(torch.int32)
    return power_of_two(torch.where(amax > 0, scale, -127).clamp(-127, 127))


def e8m0_rule(element: Format, rounding: str | None) -> tuple[int, float]:
    """Returns the exponent of ``element.max``, and the m from which an amax 2^k * m gets a scale twice as large."""
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
    """Returns k (int32) and m (float32, in [1, 2)) of positive float32 values 2^k * m."""
    mantissa, exponent = frexp(values)
    return exponent - 1, mantissa * 2


def four_over_six_scales(blocks: Tensor, encode_scale: Tensor, cast: Cast, dims: tuple[int, ...]) -> Tensor:
    """:func:`block_scales` with 4/6, which chooses 6 where both errors are equal."""
    amax = block_amax(blocks, dims)
    amount = amax if cast.scale.factor == 1 else amax * cast.scale.factor
    wanted = _divide_by(amount, cast.format.max) * encode_scale
    six, four = _round_exmy(wanted, cast), _round_exmy(wanted * 1.5, cast)
    gain = _excess_error(blocks, four, six, inverse(encode_scale), cast=cast)
    scales = torch.where(_sum_in_halves(gain, dims) < 0, four, six)
    return torch.where(torch.isfinite(amax), scales, torch.nan)


def _sum_in_halves(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sums over some dimensions, which keep the size 1, in one order everywhere: halves are added to each other."""
    for dim in dims:
        while (size := values.shape[dim]) > 1:
            half = 1 << (size - 1).bit_length() - 1  # the largest power of two below the size
            first, second = values.narrow(dim, 0, half), values.narrow(dim, half, size - half)
            added = first.narrow(dim, 0, size - half) + second
            rest = first.narrow(dim, size - half, 2 * half - size)
            values = torch.cat([added, rest], dim) if size < 2 * half else added
    return values


@compiled
def _excess_error(blocks: Tensor, scales: Tensor, others: Tensor, decode_scale: Tensor, *, cast: Cast) -> Tensor:
    def error(scales: Tensor) -> Tensor:
        codes = round_nearest(blocks.float() * encode_factor(scales, decode_scale, cast), cast.format)
        difference = codes * (scales * decode_scale) - blocks.float()
        return difference.square() if cast.scale.four_over_six == "mse" else difference.abs()

    return error(scales) - error(others)


def corrected_scales(
    blocks: Tensor, scales: Tensor, decode_scale: Tensor, cast: Cast, rows: int | None, draws: Tensor | None
) -> Tensor:
    """Returns s' of a blocked view and its s: float32, the shape of ``scales``. ``rows`` counts the rows of the matrix
    where blocks lie along them; None where they lie along columns. The order of the sums is fixed, as in 4/6."""
    count, dims = int(cast.scale.correction or 0) // int(cast.scale.block), (1,)  # type: ignore[arg-type]

    def group_sums(values: Tensor) -> Tensor:
        lines = _sum_in_halves(values, dims)  # [blocks, 1] or [blocks of a column, 1, columns]
        lines = lines.reshape(rows, -1) if rows is not None else lines.flatten(1).t()
        groups = F.pad(lines, (0, -lines.shape[1] % count)).reshape(len(lines), -1, count)
        spread = _sum_in_halves(groups, (2,)).expand_as(groups).reshape(len(lines), -1)[:, : lines.shape[1]]
        return (spread if rows is not None else spread.t()).reshape(scales.shape)

    if blocks.numel() == 0:
        return scales
    norm, product = (group_sums(_square(blocks, scales, decode_scale, cast=cast, coded=it)) for it in (False, True))
    wanted = scales * torch.where(product == 0, 1.0, norm / product)
    return _round_exmy(wanted, cast, draws)


@compiled
def _square(blocks: Tensor, scales: Tensor, decode_scale: Tensor, *, cast: Cast, coded: bool) -> Tensor:
    """Elements in units of the tensor's scale, times themselves or, if ``coded``, times their rounded values."""
    y = blocks.float() * encode_factor(scales, decode_scale, cast)
    return y * (round_nearest(y, cast.grid) if coded else y) * scales.square()


def encode_factor(scales: Tensor, decode_scale: Tensor, cast: Cast) -> Tensor:
    """Returns e from the result of :func:`block_scales` (float32, any shape) and 1/S (0-d float32)."""
    if cast.scale.format == "fp32":
        return scales
    return inverse(scales * decode_scale).clamp(max=_FLOAT32_MAX)


def stored_scales(scales: Tensor, cast: Cast) -> Tensor:
    return inverse(scales) if cast.scale.format == "fp32" else scales
