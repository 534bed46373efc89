"""Sums over patches by the C++ kernels."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_lowbit.kernels.cpu.library import library

# The numbers of dtypes in source/patches.cpp.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def add_patches(patches: Tensor, images: int, channels: int, dimensions: Sequence[Sequence[int]]) -> Tensor | None:
    """:func:`lightning_lowbit.kernels.patches.add_patches` on a CPU; None where no kernel does it."""
    kernels = library()
    if kernels is None or patches.dtype not in _DTYPES or len(dimensions) > 3:
        return None
    three = [[1, 1, 1, 1, 1, 0]] * (3 - len(dimensions)) + [[*each] for each in dimensions]
    numbers = (ctypes.c_int64 * 18)(*(number for each in three for number in each))
    patches, sizes = patches.contiguous(), [each[0] for each in dimensions]
    result = patches.new_empty(images, *sizes, channels)
    kernels.lowbit_add_patches(
        patches.data_ptr(),
        _DTYPES[patches.dtype],
        result.data_ptr(),
        images,
        channels,
        ctypes.addressof(numbers),
        torch.get_num_threads(),
    )
    return result
