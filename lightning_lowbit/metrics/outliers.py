"""How far the largest elements of an activation stand out.

With x the elements and σ their standard deviation about their mean m:

    amax           max |x|, of each channel
    kurtosis       mean (x - m)⁴ / σ⁴             3 where x is normally distributed, larger with heavier tails
    outliers       of the elements, the share with |x| > k·rms

Channels far larger than all others make activations hard to quantize: with one scale for the tensor they leave few
levels for the rest (LLM.int8(), arXiv 2208.07339). Kurtosis is their usual measure (Quantizable Transformers, arXiv
2306.12929, section 3).

All follow from sums and maxima, which add up over micro-batches and ranks. A pass over x makes the sums of its powers
and its amaxes, a second one the count. Within a channel it adds up float32, then float64: kurtosis is exact to some
1e-6 where |m| < σ, and has a range, of magnitudes from 1e-9 to 4e9. Nothing waits for a device.
"""

import torch
from torch import Tensor

from lightning_lowbit.compilation import compiled, opaque
from lightning_lowbit.quant.statistics import wide_dtype

# What is added up: the elements, their powers, and how many are beyond k·rms.
SUMS = ("elements", "first", "second", "third", "fourth", "beyond")


@opaque(
    lambda x, k: (
        x.new_empty(len(SUMS), dtype=wide_dtype(x.device)),
        x.new_empty(x.shape[-1], dtype=torch.float32),
    )
)
def activation_sums(x: Tensor, k: float) -> tuple[Tensor, Tensor]:
    """What adds up over passes, and what their maximum is taken of.

    Args:
        x: floating point, ``[..., channels]``.
        k: how many times the root mean square of ``x`` an element must exceed to be an outlier. Of normally
            distributed elements 2e-9 are beyond 6.

    Returns:
        ``SUMS``, float64 (float32 on Apple's GPUs) ``[6]``, and amaxes, float32 ``[channels]``.
    """
    wide, channels = wide_dtype(x.device), x.shape[-1]
    elements = torch.full((1,), x.numel(), dtype=wide, device=x.device)
    if not x.numel():
        return torch.cat([elements, elements.new_zeros(len(SUMS) - 1)]), x.new_zeros(channels, dtype=torch.float32)
    tokens = x.reshape(-1, 1, channels)
    *powers, amax = _of_channels(tokens).unbind()
    sums = torch.stack(powers).sum(1, dtype=wide)
    limit = k * (sums[1] / x.numel()).sqrt()
    beyond = _count_beyond(tokens, limit.float().view(1, 1, 1)).sum(dtype=wide)
    return torch.cat([elements, sums, beyond[None]]), amax.clone()


# Both take [tokens, 1, channels], and reduce over tokens alone: so all sums are made by one loop.
@compiled
def _of_channels(x: Tensor) -> Tensor:
    """Sums of powers 1 to 4 and amax of each channel: float32 ``[5, channels]``."""
    x = x.float()
    square = x * x
    sums = [power.sum((0, 1)) for power in (x, square, square * x, square * square)]
    return torch.stack([*sums, x.abs().amax((0, 1))])


@compiled
def _count_beyond(x: Tensor, limit: Tensor) -> Tensor:
    """How many elements of each channel are beyond a limit: float32 ``[channels]``, exact up to 2^24."""
    return (x.float().abs() > limit).float().sum((0, 1))


def kurtosis(sums: Tensor) -> Tensor:
    """Central kurtosis, NaN where it has none, from ``SUMS``: ``[..., 6]`` to ``[...]``."""
    elements, *powers, _ = sums.unbind(-1)
    mean, second, third, fourth = (power / elements for power in powers)
    variance = second - mean**2
    central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
    # Of equal elements the variance is what rounding leaves of it.
    varies = variance > 1e-6 * second
    return torch.where(varies & central.isfinite(), central / variance**2, torch.nan)


def outlier_share(sums: Tensor) -> Tensor:
    """Share of elements beyond k·rms, NaN where it has none, from ``SUMS``: ``[..., 6]`` to ``[...]``."""
    return torch.where(sums[..., 2].isfinite(), sums[..., 5] / sums[..., 0], torch.nan)
