"""Sums over patches by the C++ kernels."""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.memory import address, start

# The numbers of dtypes in source/patches.cpp.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def add_patches(patches: Tensor, images: int, channels: int, dimensions: Sequence[Sequence[int]]) -> Tensor | None:
    """:func:`lightning_lowbit.kernels.patches.add_patches` on a CPU; None where no kernel does it."""
    kernels = library()
    if kernels is None or patches.dtype not in _DTYPES or len(dimensions) > 3:
        return None
    three = [[1, 1, 1, 1, 1, 0]] * (3 - len(dimensions)) + [[*each] for each in dimensions]
    numbers = (ctypes.c_int64 * 18)(*(number for each in three for number in each))
    if min(images, channels, *(number for each in three for number in each[:5])) < 1:
        return None
    patches, result = patches.contiguous(), patches.new_empty(images, *(each[0] for each in dimensions), channels)
    touched = images * channels * math.prod(each[1] * each[2] for each in three)
    kernels.lowbit_add_patches(
        address("patches", patches, patches.dtype, touched),
        _DTYPES[patches.dtype],
        start(result),
        images,
        channels,
        ctypes.addressof(numbers),
        torch.get_num_threads(),
    )
    return result
