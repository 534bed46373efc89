"""Activations and weights, and outlier statistics of one as the monitors compute them over many."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.metrics.outliers import activation_sums, kurtosis, outlier_share


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Outliers(NamedTuple):
    channel_amax: Tensor
    kurtosis: Tensor
    outliers: Tensor


@torch.no_grad()
def activation_outliers(x, k=6.0):
    sums, channel_amax = activation_sums(x, k)
    return Outliers(channel_amax, kurtosis(sums).float(), outlier_share(sums).float())
