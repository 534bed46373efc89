"""Splitting off the mean of a matrix over its rows.

Activations and gradients often share one direction over all tokens, and that direction holds most of their outliers
(Averis, arXiv 2603.10444). Quantized without it, they spend their few levels on what tells tokens apart; the mean
itself is one row, which high precision affords.
"""

import torch
from torch import Tensor

from lightning_lowbit.compilation import opaque


@opaque(lambda x: (torch.empty_like(x), x.new_empty((1, x.shape[1]), dtype=torch.float32)))
def split_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """``X - 1 μᵀ`` and ``μᵀ``.

    Args:
        x: ``[tokens, features]``.

    Returns:
        The rest in the dtype of ``x`` (subtracted in float32, rounded once), and the mean, float32 ``[1, features]``.
    """
    mean = x.sum(0, keepdim=True, dtype=torch.float32) / max(len(x), 1)
    return (x.float() - mean).to(x.dtype), mean
