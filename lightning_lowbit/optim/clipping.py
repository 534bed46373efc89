"""The rules that clip spikes: AdaClip, SpikeClip, AdaGN, GradClip.

    AdaClip     T follows M = max|g|;  elements above T are scaled by T/M            (element-wise spikes)
    AdaGN       m, v follow n = ‖g‖₂ and n²;  g is rescaled to the norm m/(√v + ε)   (whole-tensor spikes)
    SpikeClip   where g² > θ·v, v Adam's second moment:  g ← sign(g)·√(θ·v)          (element-wise)
    GradClip    ‖g‖₂ over all parameters is at most a fixed value                    (all tensors at once)

T, m and v are exponential moving averages. The state keeps the bias-corrected T̂ = T/(1 − γᵗ) itself:

    T̂ₜ = T̂ₜ₋₁ + wₜ·(Mₜ − T̂ₜ₋₁),    wₜ = (1 − γ)/(1 − γᵗ) = 1 / (1 − γ/(1 − γ)·expm1((t − 1)·log γ))

This form is exact at t = 1, and accurate in fp32 at γ = .99999, where γ and 1 − γᵗ rounded to fp32 are wrong by 1e-3.
Nothing here waits for an accelerator. Statistics are tensors [P], one entry per parameter.

Source: the Stable-SPAM thesis, chapter 3 and algorithm A.1; SpikeClip: its equation 2.1, and SPAM (arXiv 2501.06842),
section 3. As there, M enters the threshold that it is compared with, and the clip is proportional: a spike just above
T may end below its unclipped neighbors.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Elements handled at a time. CPU: parameter, gradient, two moments and a scratch tensor in fp32 stay within 5 MB of
# second-level cache (of 2^15 … 2^20, smaller ones cost calls, larger ones gain little). Elsewhere: few launches, about
# 1 GB of scratch.
PIECE_ON_CPU, PIECE_ON_ACCELERATOR = 2**18, 2**26

Scalar = Tensor | float


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of one length along the first dimension; the first tensor decides the rows of a piece."""
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
    """max|x|: 0-d, in the tensor's dtype; 0 if it is empty; NaN and Inf are kept."""
    if tensor.numel() == 0:
        return tensor.new_zeros(())
    low, high = torch.aminmax(tensor)  # one pass; the infinity norm takes several times as long on a CPU
    return torch.maximum(-low, high)


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Σx² over all elements, 0-d; on a CPU more than twice as fast as a norm."""
    flat = tensor.flatten()
    return torch.dot(flat, flat)


def largest_root(dtype: torch.dtype, summed: int = 1) -> float:
    """A number of which ``summed`` squares, added up, fit with a factor of four to spare: 9e18 for one in fp32."""
    return float((torch.finfo(dtype).max / summed) ** 0.5 / 2)


def norm_of(norms: Tensor) -> Tensor:
    """√Σn², 0-d, of norms whose squares need not fit the dtype."""
    largest = norms.max().clamp(min=torch.finfo(norms.dtype).tiny)
    return largest * (norms / largest).square().sum().sqrt()


def averaging_weight(decay: float, steps_before: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight of the newest value in a bias-corrected moving average, (1 − γ)/(1 − γᵗ) with t = steps_before + 1.

    With no step before, it is exactly 1 and nothing older survives, which is also how moments are reset.
    """
    log_decay = math.log(decay) if decay > 0 else -1e30  # γ = 0: expm1 gives 0 or -1, times γ = 0
    return 1 / (1 - decay / (1 - decay) * torch.expm1(steps_before.to(dtype) * log_decay))


def growing_weight(new: Scalar, total: Tensor) -> tuple[Tensor, Tensor]:
    """The weight (1 − γₜ)/(1 − γ₁·γ₂·…·γₜ) of the newest value in an average whose γ may change, and the new total.

    ``new`` is 1 − γₜ, in (0, 1]. ``total`` is 1 − γ₁·…·γₜ₋₁, 0 at the first step and after a reset; any shape. In fp32
    the error of both results is about 6e-8/(1 − γ).
    """
    total = torch.lerp(total, torch.ones_like(total), new)
    return new / total, total


def along_cosine(start: float, end: float, steps: Tensor, of: int, dtype: torch.dtype) -> Tensor:
    """From ``start`` to ``end`` along half a cosine over ``of`` steps, then ``end``; the shape of ``steps``."""
    progress = (steps.to(dtype) / of).clamp(max=1.0)
    return end + (start - end) * (1 + torch.cos(math.pi * progress)) / 2


def clip_ratio(maximum: Tensor, threshold: Tensor) -> Tensor:
    """AdaClip's factor for the elements above the threshold: T/M [P], at most 1; 1 where M = 0."""
    return torch.where(maximum > threshold, threshold / maximum, 1.0)


def is_spike(gradient: Tensor, threshold: Tensor) -> Tensor:
    """The elements that AdaClip shrinks: bool, whether |g| > T."""
    return gradient.abs() > threshold


def ada_clip(gradient: Tensor, spikes: Tensor, ratio: Tensor) -> Tensor:
    """AdaClip into a new tensor: g·ratio where ``spikes`` says so, otherwise g."""
    return torch.where(spikes, gradient * ratio, gradient)


def spike_clip(gradient: Tensor, mean_square: Tensor, factor: Scalar) -> Tensor:
    """SpikeClip into a new tensor: g limited to ±√(factor·v), where v > 0; v is ``mean_square``, of the shape of g.

    ``factor`` is θ, or θ·(1 − β2ᵏ) with a bias-corrected v, or Inf for no clip.
    """
    limit = torch.where(mean_square > 0, mean_square * factor, math.inf).sqrt_()
    return torch.minimum(torch.maximum(gradient, -limit), limit)


def norm_ratio(norm: Tensor, norm_mean: Tensor, norm_mean_square: Tensor, eps: float) -> Tensor:
    """AdaGN's factor for a gradient: m/(√v + ε) / n [P]; 0 where n = 0, so that a zero gradient stays zero.

    n is the norm after the rule for elements, m and v the bias-corrected averages of n and n².
    """
    return torch.where(norm > 0, norm_mean / (norm_mean_square.sqrt() + eps) / norm, 0.0)
