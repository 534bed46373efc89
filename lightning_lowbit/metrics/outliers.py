"""Measures of how far the largest elements of an activation stand out.

With x the elements, m their mean and σ their standard deviation:

    amax           max |x|, of each channel
    kurtosis       mean (x - m)⁴ / σ⁴             3 where x is normally distributed, larger with heavier tails
    outliers       of the elements, the share with |x| > k·rms

See LLM.int8() (arXiv 2208.07339) and Quantizable Transformers (arXiv 2306.12929, section 3). All follow from sums and
maxima, which can be combined over micro-batches and ranks. Sums are float32 within a channel, then float64: kurtosis is
exact to about 1e-6 for |m| < σ and magnitudes from 1e-9 to 4e9.
"""

import torch
from torch import Tensor

from lightning_lowbit._torch.devices import wide_dtype
from lightning_lowbit.compilation import compiled, opaque

# The sums: the number of elements, their powers, and how many are beyond k·rms.
SUMS = ("elements", "first", "second", "third", "fourth", "beyond")


@opaque(lambda x, k: (x.new_empty(6, dtype=wide_dtype(x.device)), x.new_empty(x.shape[-1], dtype=torch.float32)))
def activation_sums(x: Tensor, k: float) -> tuple[Tensor, Tensor]:
    """Computes ``SUMS`` in one pass, float64 (float32 on Apple's GPUs) ``[6]``, and amaxes, float32 ``[channels]``.

    ``x`` is floating point, ``[..., channels]``. An element is an outlier if it exceeds ``k`` times the root mean
    square; of normally distributed elements 2e-9 are beyond 6.
    """
    wide, channels = wide_dtype(x.device), x.shape[-1]
    elements = torch.full((1,), x.numel(), dtype=wide, device=x.device)
    if not x.numel():
        return torch.cat([elements, elements.new_zeros(len(SUMS) - 1)]), x.new_zeros(channels, dtype=torch.float32)
    tokens = x.reshape(-1, 1, channels)
    *powers, amax = _channel_sums(tokens).unbind()
    sums = torch.stack(powers).sum(1, dtype=wide)
    limit = k * (sums[1] / x.numel()).sqrt()
    beyond = _count_beyond(tokens, limit.float().view(1, 1, 1)).sum(dtype=wide)
    return torch.cat([elements, sums, beyond[None]]), amax.clone()


# Both take [tokens, 1, channels], and reduce over tokens alone: so all sums are made by one loop.
@compiled
def _channel_sums(x: Tensor) -> Tensor:
    """Returns sums of powers 1 to 4 and amax of each channel: float32 ``[5, channels]``."""
    x = x.float()
    square = x * x
    sums = [power.sum((0, 1)) for power in (x, square, square * x, square * square)]
    return torch.stack([*sums, x.abs().amax((0, 1))])


@compiled
def _count_beyond(x: Tensor, limit: Tensor) -> Tensor:
    """Counts elements of each channel beyond a limit: float32 ``[channels]``, exact up to 2^24."""
    return (x.float().abs() > limit).float().sum((0, 1))


def kurtosis(sums: Tensor) -> Tensor:
    """Returns the central kurtosis from ``SUMS``, ``[..., 6]`` to ``[...]``; NaN where it is undefined."""
    elements, *powers, _ = sums.unbind(-1)
    mean, second, third, fourth = (power / elements for power in powers)
    variance = second - mean**2
    central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
    # The variance of equal elements is rounding error.
    varies = variance > 1e-6 * second
    return torch.where(varies & central.isfinite(), central / variance**2, torch.nan)


def outlier_share(sums: Tensor) -> Tensor:
    """Returns the share of elements beyond k·rms from ``SUMS``, ``[..., 6]`` to ``[...]``; NaN if undefined."""
    return torch.where(sums[..., 2].isfinite(), sums[..., 5] / sums[..., 0], torch.nan)
