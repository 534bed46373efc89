"""The ratio of a gradient to the noise of quantization.

Two backward passes over the same data with different random bits give g₁ and g₂: the same gradient G, and independent
noise of variance σ² in each of d elements.

    signal  ⟨g₁, g₂⟩            E = ‖G‖²      without bias, where ‖g₁‖² would be ‖G‖² + σ²d
    noise   ‖g₁ - g₂‖² / 2      E = σ²d
    ratio   √(signal / noise) = ‖G‖ / (σ √d)

At a ratio of √3 a step descends by 3/4 of what it would without noise; below, noise dominates (FP4 All the Way, arXiv
2505.19115, section 4).
"""

import torch
from torch import Tensor

from lightning_lowbit._torch.devices import wide_dtype


@torch.no_grad()
def gradient_noise_sums(first: Tensor, second: Tensor) -> Tensor:
    """Returns noise ``Σ (g₁ - g₂)² / 2`` and signal ``Σ g₁ g₂`` of two draws of a gradient; sums of parts add up.

    The result is ``[2]``, float64 (float32 on Apple's GPUs), NaN or infinite where an element is. Draws of different
    shapes are a ``ValueError``.
    """
    if first.shape != second.shape:
        raise ValueError(f"Two draws have one shape; got {tuple(first.shape)} and {tuple(second.shape)}.")
    wide = wide_dtype(first.device)
    if torch.finfo(first.dtype).bits < 32:
        first, second = first.float(), second.float()
    # g₁g₂ follows from the squares of g₁ + g₂ and g₁ - g₂, which norms add up without a copy in float64.
    apart = torch.linalg.vector_norm(first - second, dtype=wide).square()
    together = torch.linalg.vector_norm(first + second, dtype=wide).square()
    return torch.stack([apart / 2, (together - apart) / 4])


@torch.no_grad()
def gradient_to_noise(sums: Tensor) -> Tensor:
    """Returns ``√(max(0, mean signal) / mean noise)``: the norm of a gradient over that of its noise, ``‖G‖ / (σ √d)``.

    The mean is taken before the root, which has less bias than a mean of ratios. The ratio ``[...]`` is 0 where the
    signal is not above 0, infinite without noise, and NaN where no measurement is finite.

    Args:
        sums: ``[measurements, ..., 2]`` from :func:`gradient_noise_sums`; sums that are not finite are left out.
    """
    is_finite = sums.isfinite().all(-1, keepdim=True)
    total = torch.where(is_finite, sums, 0.0).sum(0)  # a ratio of means, since both have the same number of terms
    noise, signal = total.unbind(-1)
    ratio = torch.where(noise > 0, (signal.clamp(min=0) / noise).sqrt(), torch.inf)
    return torch.where(is_finite.any(0).squeeze(-1), ratio, torch.nan)
