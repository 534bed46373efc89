"""Measures of how far the largest elements of an activation stand out, and of SwiGLUs that make them, or soon will.

With x the elements of an activation, m their mean and σ their standard deviation:

    amax           max |x|, of each channel
    kurtosis       mean (x - m)⁴ / σ⁴             3 where x is normally distributed, larger with heavier tails
    outliers       of the elements, the share with |x| > k·rms

With h = (w1ᵀx) Swish(w2ᵀx) a channel of a SwiGLU, w1 a row of its up projection and w2 one of its gate projection:

    cosine         |w1ᵀw2| / (‖w1‖ ‖w2‖)          1 where both branches see one projection of x, and h its square
    gate norm      ‖w2‖                           grows before the cosine does

See LLM.int8() (arXiv 2208.07339) and Quantizable Transformers (arXiv 2306.12929, section 3). Measures of activations
follow from sums and maxima, which can be combined over micro-batches and ranks. Sums are float32 within a channel, then
float64: kurtosis is exact to about 1e-6 for |m| < σ and magnitudes from 1e-9 to 4e9.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lowbit._torch.devices import wide_dtype
from lightning_lowbit.compilation import compiled, opaque
from lightning_lowbit.metrics.casts import ratio
from lightning_lowbit.quant import amax_along

# The sums: the number of elements, their powers, and how many are beyond k·rms.
SUMS = ("elements", "first", "second", "third", "fourth", "beyond")

_ROWS = 1024  # rows that are float32 at one time: at 4096 columns 16 MiB, and enough to fill a GPU


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


@dataclass(frozen=True, eq=False)
class SwiGLUAlignment:
    """The closeness of each channel of a SwiGLU to squaring one projection of its input; see :func:`swiglu_alignment`.

    Attributes:
        cosine: ``|cos(w1, w2)|``, float32 ``[hidden]``, from 0 to 1; NaN where a row holds a NaN or an infinity, else 0
            where one is all zeros. Rows of independent normal numbers have about ``0.8 / sqrt(in)``.
        gate_norm: ``‖w2‖``, float32 ``[hidden]``, in units of the weight; NaN where the row holds a NaN or an infinity.
    """

    cosine: Tensor
    gate_norm: Tensor


@torch.no_grad()
def swiglu_alignment(gate_weight: Tensor, up_weight: Tensor) -> SwiGLUAlignment:
    """Measures how close each channel of a SwiGLU is to making outliers.

    In a channel ``(w1ᵀx) Swish(w2ᵀx)``, w1 is a row of the up projection and w2 one of the gate projection. Where w1 =
    ±w2 both factors are large for the same tokens, and the channel gives about ``±(w2ᵀx)²`` where its gate is open.
    Weight decay leads there once the sigmoid in Swish is flat for all tokens (arXiv 2409.12517, theorem 1). In Llama2
    7B (section 4.3) ``‖w2‖`` of a few channels grew first; then their cosine rose steeply, between 125 and 210 billion
    tokens, and FP8 training diverged. The computation is in float32, on the device of the weights, without biases.

    Args:
        gate_weight, up_weight: of ``gate_proj`` and ``up_proj``, floating point, ``[hidden, in]``, as ``nn.Linear`` has
            them; a ``ValueError`` if they are not matrices of one shape.
    """
    if gate_weight.dim() != 2 or gate_weight.shape != up_weight.shape:
        raise ValueError(
            "The alignment of a SwiGLU needs the weights of its gate and up projection, both [hidden, in]; got "
            f"{tuple(gate_weight.shape)} and {tuple(up_weight.shape)}. Pass those of one MLP: split a fused weight, "
            "and transpose those of Conv1D."
        )
    cosines, norms = list[Tensor](), list[Tensor]()
    for gate, up in zip(torch.split(gate_weight, _ROWS), torch.split(up_weight, _ROWS), strict=True):
        (w2, gate_size), (w1, _) = _direction(gate.float()), _direction(up.float())
        size1, size2 = torch.linalg.vector_norm(w1, dim=1), torch.linalg.vector_norm(w2, dim=1)
        cosines.append(ratio((w1 * w2).sum(1).abs(), size1 * size2).clamp(max=1))
        norms.append(gate_size * size2)
    return SwiGLUAlignment(torch.cat(cosines), torch.cat(norms))


def _direction(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Divides rows by their largest magnitudes: the squares then neither overflow nor all underflow."""
    size = amax_along(rows, 1)
    return rows / torch.where(size == 0, 1.0, size), size.squeeze(1)
