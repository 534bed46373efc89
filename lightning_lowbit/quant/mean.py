"""Splitting off the mean of a matrix over its rows, which stays in high precision.

Activations and gradients often share one direction over all tokens, which holds most of their outliers (Averis,
arXiv 2603.10444). Without it, quantized values resolve the differences between tokens.
"""

import torch
from torch import Tensor

from lightning_lowbit.compilation import opaque


@opaque(lambda x: (torch.empty_like(x), x.new_empty((1, x.shape[1]), dtype=torch.float32)))
def split_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Splits ``[tokens, features]`` into ``X - 1 μᵀ``, in the dtype of ``x``, and ``μᵀ``, float32 ``[1, features]``."""
    mean = x.sum(0, keepdim=True, dtype=torch.float32) / max(len(x), 1)
    return (x.float() - mean).to(x.dtype), mean
