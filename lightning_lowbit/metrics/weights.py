"""Measures of quantized weights during training.

With w the latent weight, in units of the scale s of its block, and q the level that it is rounded to:

    shares        how many elements are -1, 0 and 1               31 % zeros: normally distributed w, s = mean|w|
    flip rate     share of elements whose q changed
    distance      mean |w - t|, t the nearest rounding threshold  t: halfway between neighboring levels
"""

import math
from functools import cache

import torch
from torch import Tensor

from lightning_lowbit.metrics.casts import code_histogram, levels
from lightning_lowbit.quant import Cast, Quantized, quantize
from lightning_lowbit.quant.operand import scaled_elements

_TERNARY = (-1.0, 0.0, 1.0)


def expected_zeros(factor: float = 1.0) -> float:
    """Returns the share of zeros among normally distributed ternary weights with ``γ = factor * mean|W|``, above 0.

    An element becomes 0 where ``|w| < γ / 2``, which has a probability of ``erf(factor / (2 √π))``: 27.0 %, 31.0 % and
    35.5 % for factors of √3/2, 1 (BitNet b1.58, arXiv 2402.17764, section 2) and 2/√3.
    """
    if not factor > 0:
        raise ValueError(f"factor is what mean|W| is multiplied by, a positive number; got {factor!r}.")
    return math.erf(factor / (2 * math.sqrt(math.pi)))


@cache
def is_ternary(cast: Cast) -> bool:
    """Tells whether the levels of a cast are -1, 0 and 1, as of ``"ternary"`` and ``"int2"``."""
    return levels(cast.grid) == _TERNARY


@torch.no_grad()
def ternary_shares(quantized: Quantized) -> Tensor:
    """Returns the shares of -1, 0 and 1: float32 ``[3]``, with a sum of 1. Elements that decode to NaN are left out.

    ``quantized`` is from :func:`lightning_lowbit.quantize`. A cast with other levels is a ``ValueError``:
    :func:`code_histogram` gives the shares of any.
    """
    if not is_ternary(quantized.cast):
        raise ValueError(
            f"{quantized.cast} has other levels than -1, 0 and 1: take code_histogram(quantized, normalize=True)."
        )
    return code_histogram(quantized, normalize=True)


@torch.no_grad()
def flipped(before: Quantized, after: Quantized) -> Tensor:
    """Finds elements with another level than before: bool. Different casts or shapes are a ``ValueError``."""
    if before.cast != after.cast or before.codes.shape != after.codes.shape:
        raise ValueError(
            "Flips are those of one tensor by one cast; got "
            f"{tuple(before.codes.shape)} by {before.cast} and {tuple(after.codes.shape)} by {after.cast}."
        )
    if before.zero_points is None:
        return before.codes != after.codes
    return before.elements() != after.elements()  # codes count from a zero point, which may have moved


def flip_rate(before: Quantized, after: Quantized) -> Tensor:
    """Returns the share of :func:`flipped` elements: float32, 0-d; NaN without elements."""
    return flipped(before, after).mean(dtype=torch.float32)


@torch.no_grad()
def threshold_distance(x: Tensor, cast: Cast, dim: int = -1, amax: Tensor | None = None) -> Tensor:
    """Returns the mean distance to the nearest rounding threshold, in units of each block's scale: float32, 0-d.

    A threshold lies halfway between two neighboring levels of ``cast.grid``: at ±0.5 for ternary elements, for which
    normally distributed weights with ``γ = mean|W|`` have a mean distance of 0.66. Where it is small, small steps make
    weights flip. Elements that become NaN or whose block's scale underflowed to 0 are left out; NaN without any others.

    Args:
        x: floating point, a matrix.
        cast: one that rounds to nearest; any other is a ``ValueError``.
        dim, amax: as in :func:`lightning_lowbit.quantize`.
    """
    if cast.draws:
        raise ValueError(f"Thresholds are those of rounding to nearest, and {cast} rounds stochastically.")
    if x.dim() != 2:
        raise ValueError(f"threshold_distance takes a matrix; got a tensor of shape {tuple(x.shape)}.")
    quantized = quantize(x, cast, dim, amax=amax)
    elements, decoded, codes = quantized.elements(), quantized.dequantize(), quantized.codes.int()
    error = scaled_elements(x.float(), cast, dim, amax) - elements
    below, above = _half_steps(cast, x.device)
    distance = torch.minimum(below[codes] + error, above[codes] - error)
    has_units = decoded.isfinite() & ((decoded != 0) | (elements == 0))
    return torch.where(has_units, distance, torch.nan).nanmean()


@cache
def _half_steps(cast: Cast, device: torch.device) -> tuple[Tensor, Tensor]:
    """float32 ``[2^bits]`` each: distances from each code's level to the next thresholds, infinite at the ends."""
    codes = torch.arange(2**cast.format.bits, dtype=torch.uint8)
    if cast.scale.statistic == "minmax":  # whole numbers from the zero point on
        values, ascending = codes.float(), codes.float()
    else:
        values, ascending = cast.format.decode(codes), torch.tensor(levels(cast.format))
    edges = torch.full((len(ascending) + 1,), torch.inf)
    edges[1:-1] = ascending.diff() / 2
    places = torch.searchsorted(ascending, values).clamp(max=len(ascending) - 1)  # codes that are no numbers are unused
    return edges[places].to(device), edges[places + 1].to(device)
