"""AdaClip and AdaGN: tame a gradient by what its own past says is usual.

Low-bit training fails by spikes: a few elements, or a whole matrix, suddenly get a gradient far above the usual.
A fixed clip value would have to be tuned for every matrix; these two rules learn one per parameter tensor.

    AdaClip   T follows M = max|g|;  elements above T are scaled by T/M       (element-wise spikes)
    AdaGN     m, v follow n = ‖g‖₂ and n²;  g is rescaled to the norm m/(√v + ε)  (whole-tensor spikes)

T, m and v are exponential moving averages, kept *bias-corrected*: what the textbook calls T̂ = T/(1 − γᵗ) is the
state itself. The two forms are equal,

    T̂ₜ = T̂ₜ₋₁ + wₜ·(Mₜ − T̂ₜ₋₁),    wₜ = (1 − γ)/(1 − γᵗ) = 1 / (1 − γ/(1 − γ)·expm1((t − 1)·log γ)),

but this one is exact at t = 1 (w is 1), divides by nothing small, and keeps its accuracy in fp32 at γ = .99999, where
γ and 1 − γᵗ rounded to fp32 are wrong by 1e-3.

Nothing here synchronises with the host. Statistics are 1-D tensors [P], one entry for each of P parameters.

Source: the Stable-SPAM thesis, chapter 3 (AdaGN: section 1, AdaClip: section 2) and algorithm A.1, whose norm is ‖g‖₂
and whose clip compares |g|. Two traits are kept on purpose: M enters the threshold it is compared with, and the clip is
proportional, so that a spike just above T may end below its unclipped neighbours.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Elements handled at a time. CPU: parameter, gradient, two moments and two scratch tensors in fp32 stay within 4 MB of
# second-level cache (2^17 and 2^18 were the fastest of 2^14 … 2^24). Elsewhere: few launches, about 1 GB of scratch.
PIECE_ON_CPU, PIECE_ON_ACCELERATOR = 2**17, 2**26


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of one shape, along the first dimension, small enough to be worked on at a time."""
    if tensors[0].numel() == 0:
        return
    tensors = tuple(tensor if tensor.dim() else tensor.unsqueeze(0) for tensor in tensors)
    elements = PIECE_ON_CPU if tensors[0].device.type == "cpu" else PIECE_ON_ACCELERATOR
    rows = max(1, elements * len(tensors[0]) // tensors[0].numel())
    yield from zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)


def absolute_maximum(tensor: Tensor) -> Tensor:
    """max|x| over all elements, 0 for an empty tensor; NaN and Inf come through.

    Args:
        tensor: any shape, any real floating dtype.

    Returns:
        0-d, the tensor's dtype.
    """
    if tensor.numel() == 0:
        return tensor.new_zeros(())
    low, high = torch.aminmax(tensor)  # one pass; the infinity norm takes several times as long on a CPU
    return torch.maximum(-low, high)


def averaging_weight(decay: float, steps_before: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight of the newest value in a bias-corrected moving average, (1 − γ)/(1 − γᵗ) with t = steps_before + 1.

    Args:
        decay: γ in [0, 1).
        steps_before: int64, any shape; number of values averaged so far. At 0 the weight is exactly 1, so that
            nothing older survives: this is also how moments are reset.
        dtype: floating dtype of the result.

    Returns:
        Shape of ``steps_before``, in (0, 1].
    """
    log_decay = math.log(decay) if decay > 0 else -1e30  # γ = 0: expm1 gives 0 or -1, times γ = 0
    return 1 / (1 - decay / (1 - decay) * torch.expm1(steps_before.to(dtype) * log_decay))


def clip_ratio(maximum: Tensor, threshold: Tensor) -> Tensor:
    """What AdaClip multiplies the elements above the threshold with: T/M, at most 1; 1 where M = 0.

    Args:
        maximum: M [P].
        threshold: T [P], bias-corrected.

    Returns:
        [P], in [0, 1].
    """
    return torch.where(maximum > threshold, threshold / maximum, 1.0)


def ada_clip(gradient: Tensor, threshold: Tensor, ratio: Tensor) -> Tensor:
    """AdaClip into a new tensor: g where |g| ≤ T, otherwise g·ratio.

    Args:
        gradient: any shape, any real floating dtype; left alone.
        threshold: T, 0-d, dtype of the statistics; M of this step has already entered it.
        ratio: `clip_ratio` of M and T, 0-d, dtype of the statistics.

    Returns:
        Shape of ``gradient``, dtype of the statistics.
    """
    factor = gradient.to(threshold.dtype).abs()
    torch.le(factor, threshold, out=factor)  # 1 where kept, 0 where clipped; faster on a CPU than a mask and `where`
    return factor.clamp_(min=ratio).mul_(gradient)


def sum_of_squares(gradient: Tensor, threshold: Tensor, ratio: Tensor, scale: Tensor) -> Tensor:
    """Σ (scale·AdaClip(g))² without a copy of the whole gradient; not finite where g is not.

    Args:
        gradient: any shape, any real floating dtype; left alone.
        threshold: T, 0-d, dtype of the statistics.
        ratio: `clip_ratio` of M and T, 0-d.
        scale: 0-d; the reciprocal of the largest clipped element keeps the squares from overflow and underflow.

    Returns:
        0-d, dtype of the statistics.
    """
    total = torch.zeros_like(threshold)
    for (piece,) in pieces(gradient):
        clipped = ada_clip(piece, threshold, ratio).mul_(scale).flatten()
        total += torch.dot(clipped, clipped)  # more than twice as fast as a norm on a CPU
    return total


def ada_clip_(gradient: Tensor, threshold: Tensor, ratio: Tensor) -> Tensor:
    """AdaClip in place; arguments as for `ada_clip`. Returns ``gradient``."""
    return gradient.copy_(ada_clip(gradient, threshold, ratio))


def norm_ratio(norm: Tensor, norm_mean: Tensor, norm_mean_square: Tensor, eps: float) -> Tensor:
    """What AdaGN multiplies a gradient with: m/(√v + ε) / n; 0 where n = 0, so that a zero gradient stays zero.

    Args:
        norm: n [P], the norms of the whole gradients after AdaClip (the same unit as the gradient to be scaled).
        norm_mean: m [P], bias-corrected average of n.
        norm_mean_square: v [P], bias-corrected average of n².
        eps: ε.

    Returns:
        [P].
    """
    return torch.where(norm > 0, norm_mean / (norm_mean_square.sqrt() + eps) / norm, 0.0)


def ada_gn_(gradient: Tensor, ratio: Tensor) -> Tensor:
    """AdaGN in place: g ← g·ratio, after which ‖g‖₂ = m/(√v + ε).

    Args:
        gradient: any shape, any real floating dtype, whole or a piece of it; changed in place.
        ratio: `norm_ratio`, 0-d.

    Returns:
        ``gradient``.
    """
    return gradient.mul_(ratio)
