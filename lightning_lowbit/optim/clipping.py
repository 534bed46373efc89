"""The rules that clip spikes: AdaClip, SpikeClip, AdaGN, GradClip.

Low-bit training fails by spikes: a few elements, or a whole matrix, suddenly get a gradient far above the usual. Two
rules learn what is usual for each parameter tensor from its own past; two older ones serve comparison.

    AdaClip     T follows M = max|g|;  elements above T are scaled by T/M            (element-wise spikes)
    AdaGN       m, v follow n = ‖g‖₂ and n²;  g is rescaled to the norm m/(√v + ε)   (whole-tensor spikes)
    SpikeClip   where g² > θ·v, v Adam's second moment:  g ← sign(g)·√(θ·v)          (element-wise)
    GradClip    ‖g‖₂ over all parameters is at most a fixed value                    (all tensors at once)

T, m and v are exponential moving averages, kept *bias-corrected*: what the textbook calls T̂ = T/(1 − γᵗ) is the
state itself. The two forms are equal,

    T̂ₜ = T̂ₜ₋₁ + wₜ·(Mₜ − T̂ₜ₋₁),    wₜ = (1 − γ)/(1 − γᵗ) = 1 / (1 − γ/(1 − γ)·expm1((t − 1)·log γ)),

but this one is exact at t = 1 (w is 1), divides by nothing small, and keeps its accuracy in fp32 at γ = .99999, where
γ and 1 − γᵗ rounded to fp32 are wrong by 1e-3. Where γ changes from step to step, 1 − γᵗ is 1 minus the product of all
γ so far, which the state keeps (`growing_weight`).

Nothing here synchronizes with an accelerator. Statistics are tensors [P], one entry per parameter; the scalars of one
parameter may be 0-d tensors or Python's numbers.

Source: the Stable-SPAM thesis, chapter 3 (AdaGN: section 1, AdaClip: section 2) and algorithm A.1, whose norm is ‖g‖₂
and whose clip compares |g|; SpikeClip is equation 2.1 there, and section 3 of SPAM (arXiv 2501.06842). Two traits of
AdaClip are kept on purpose: M enters the threshold it is compared with, and the clip is proportional, so that a spike
just above T may end below its unclipped neighbors.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements handled at a time. CPU: parameter, gradient, two moments and a scratch tensor in fp32 stay within 5 MB of
# second-level cache (of 2^15 … 2^20, smaller ones cost calls, larger ones gain little). Elsewhere: few launches, about
# 1 GB of scratch.
PIECE_ON_CPU, PIECE_ON_ACCELERATOR = 2**18, 2**26

Scalar = Tensor | float


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of one length, along the first dimension, small enough to be worked on at a time.

    The first tensor decides how many rows are in a piece. In a graph of ``torch.compile`` there is one piece.
    """
    if tensors[0].numel() == 0:
        return
    tensors = tuple(tensor if tensor.dim() else tensor.unsqueeze(0) for tensor in tensors)
    elements = PIECE_ON_CPU if tensors[0].device.type == "cpu" else PIECE_ON_ACCELERATOR
    if tensors[0].numel() <= elements or torch.compiler.is_compiling():
        yield tensors
        return
    rows = max(1, elements * len(tensors[0]) // tensors[0].numel())
    yield from zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)


def amax(tensor: Tensor) -> Tensor:
    """max|x| of a tensor of any real floating dtype: 0-d, that dtype; 0 if it is empty; NaN and Inf come through."""
    if tensor.numel() == 0:
        return tensor.new_zeros(())
    low, high = torch.aminmax(tensor)  # one pass; the infinity norm takes several times as long on a CPU
    return torch.maximum(-low, high)


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Σx² over all elements, 0-d; more than twice as fast as a norm on a CPU."""
    flat = tensor.flatten()
    return torch.dot(flat, flat)


def largest_root(dtype: torch.dtype, summed: int = 1) -> float:
    """A number of which so many squares, added up, fit with a factor of four to spare: one of 9e18 in fp32."""
    return float((torch.finfo(dtype).max / summed) ** 0.5 / 2)


def norm_of(norms: Tensor) -> Tensor:
    """√Σn², 0-d, of norms whose squares need not fit."""
    largest = norms.max().clamp(min=torch.finfo(norms.dtype).tiny)
    return largest * (norms / largest).square().sum().sqrt()


def averaging_weight(decay: float, steps_before: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight of the newest value in a bias-corrected moving average, (1 − γ)/(1 − γᵗ) with t = steps_before + 1.

    With no step before, the weight is exactly 1 and nothing older survives, which is also how moments are reset.
    """
    log_decay = math.log(decay) if decay > 0 else -1e30  # γ = 0: expm1 gives 0 or -1, times γ = 0
    return 1 / (1 - decay / (1 - decay) * torch.expm1(steps_before.to(dtype) * log_decay))


def growing_weight(new: Scalar, total: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of the newest value in a bias-corrected moving average whose γ may change, (1 − γₜ)/(1 − γ₁·γ₂·…·γₜ).

    Args:
        new: 1 − γₜ, in (0, 1]; a number, or the shape of ``total``.
        total: 1 − γ₁·…·γₜ₋₁ of the steps before, 0 at the first and after a reset; any shape.

    Returns:
        The weight, in (0, 1], and the new total. In fp32 their error is about 6e-8/(1 − γ).
    """
    total = torch.lerp(total, torch.ones_like(total), new)
    return new / total, total


def along_cosine(start: float, end: float, steps: Tensor, of: int, dtype: torch.dtype) -> Tensor:
    """From ``start`` to ``end`` along half a cosine over so many steps, then ``end``; the shape of ``steps``."""
    progress = (steps.to(dtype) / of).clamp(max=1.0)
    return end + (start - end) * (1 + torch.cos(math.pi * progress)) / 2


def clip_ratio(maximum: Tensor, threshold: Tensor) -> Tensor:
    """What AdaClip multiplies the elements above the threshold with: T/M [P], at most 1; 1 where M = 0."""
    return torch.where(maximum > threshold, threshold / maximum, 1.0)


def spikes(gradient: Tensor, threshold: Scalar) -> Tensor:
    """What AdaClip shrinks: g where |g| > T, elsewhere 0. M of this step has already entered T."""
    if isinstance(threshold, Tensor):
        return torch.where(gradient.abs() > threshold, gradient, 0.0)
    return F.hardshrink(gradient, threshold)


def ada_clip(gradient: Tensor, above: Tensor, ratio: Scalar) -> Tensor:
    """AdaClip into a new tensor: g where |g| ≤ T, otherwise g·ratio. ``above``: the `spikes` of g."""
    kept = gradient - above
    return kept.addcmul_(above, ratio) if isinstance(ratio, Tensor) else kept.add_(above, alpha=ratio)


def spike_clip(gradient: Tensor, mean_square: Tensor, factor: Scalar) -> Tensor:
    """SpikeClip into a new tensor: g limited to ±√(factor·v), where v > 0.

    Args:
        gradient: any shape, the dtype of the statistics; left alone.
        mean_square: v, of the same shape.
        factor: θ, or Inf to clip nothing. With a bias-corrected v, θ·(1 − β2ᵏ).
    """
    limit = torch.where(mean_square > 0, mean_square * factor, math.inf).sqrt_()
    return torch.minimum(torch.maximum(gradient, -limit), limit)


def norm_ratio(norm: Tensor, norm_mean: Tensor, norm_mean_square: Tensor, eps: float) -> Tensor:
    """What AdaGN multiplies a gradient with: m/(√v + ε) / n; 0 where n = 0, so that a zero gradient stays zero.

    Args:
        norm: n [P] of the whole gradients after the clip (the same unit as the gradient to be scaled).
        norm_mean: m [P], bias-corrected average of n.
        norm_mean_square: v [P], bias-corrected average of n².
        eps: ε.
    """
    return torch.where(norm > 0, norm_mean / (norm_mean_square.sqrt() + eps) / norm, 0.0)
