"""How far a gradient stands out from the noise of quantization.

Two backward passes over the same data whose random bits differ give g₁ and g₂: the same gradient G, and noise of
variance σ² in each of d elements, independent of the other's.

    signal  ⟨g₁, g₂⟩            E = ‖G‖²      without bias, where ‖g₁‖² would be ‖G‖² + σ²d
    noise   ‖g₁ - g₂‖² / 2      E = σ²d
    ratio   √(signal / noise) = ‖G‖ / (σ √d)

Training is most sensitive to noise at a ratio of √3, where a step descends by 3/4 of what it would without noise;
below, noise takes over (FP4 All the Way, arXiv 2505.19115, section 4).
"""

import torch
from torch import Tensor

from lightning_lowbit.quant.statistics import wide_dtype


@torch.no_grad()
def gradient_noise_sums(first: Tensor, second: Tensor) -> Tensor:
    """Noise and signal in two draws of a gradient, as sums over elements: those of parts add up to those of the whole.

    Args:
        first, second: floating point, of one shape.

    Returns:
        ``[2]``: ``Σ (g₁ - g₂)² / 2`` and ``Σ g₁ g₂``, in units of g²; float64 (float32 on Apple's GPUs). NaN or
        infinite where an element is.

    Raises:
        ValueError: the shapes differ.
    """
    if first.shape != second.shape:
        raise ValueError(
            f"Two draws of one gradient have one shape; got {tuple(first.shape)} and {tuple(second.shape)}."
        )
    wide = wide_dtype(first.device)
    if torch.finfo(first.dtype).bits < 32:
        first, second = first.float(), second.float()
    # Of a sum and a difference, the product follows from their squares, which norms add up without a copy in float64.
    apart = torch.linalg.vector_norm(first - second, dtype=wide).square()
    together = torch.linalg.vector_norm(first + second, dtype=wide).square()
    return torch.stack([apart / 2, (together - apart) / 4])


@torch.no_grad()
def gradient_to_noise(sums: Tensor) -> Tensor:
    """``√(max(0, mean signal) / mean noise)``: the norm of a gradient over that of its noise, ``‖G‖ / (σ √d)``.

    The mean is taken before the root, which then has less bias than a mean of ratios.

    Args:
        sums: ``[measurements, ..., 2]``: of each measurement what :func:`gradient_noise_sums` gives. One that is not
            finite is left out.

    Returns:
        ``[...]``. 0 where the signal is not above 0: it drowns in the noise. Infinite without any noise; NaN where no
        measurement is finite.
    """
    is_finite = sums.isfinite().all(-1, keepdim=True)
    total = torch.where(is_finite, sums, 0.0).sum(0)  # of as many measurements on top as below
    noise, signal = total.unbind(-1)
    ratio = torch.where(noise > 0, (signal.clamp(min=0) / noise).sqrt(), torch.inf)
    return torch.where(is_finite.any(0).squeeze(-1), ratio, torch.nan)
