"""Sums over patches of images in one call, where a kernel makes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_lowbit.compilation import takes_cpp
from lightning_lowbit.kernels.cpu import patches as cpu
from lightning_lowbit.kernels.memory import resolved


def add_patches(patches: Tensor, images: int, channels: int, dimensions: Sequence[Sequence[int]]) -> Tensor | None:
    """Images ``[images, *sizes, channels]`` whose pixels are sums over the patches that hold them, in float32 and in
    the order of the kernel, rounded once to the dtype of ``patches``; None where no kernel does it.

    Args:
        patches: ``[images · positions, kernel · channels]``.
        dimensions: of each dimension of space its size, the number of positions, and size, stride and dilation of the
            kernel, and the zeros before the image.
    """
    if torch.compiler.is_compiling() or type(patches) is not Tensor or patches.numel() == 0:
        return None
    if takes_cpp(patches.device):
        return cpu.add_patches(resolved(patches), images, channels, dimensions)
    return None
