"""Patches in a layer: when their pixels may be quantized first, and their sums in a graph of autograd."""

from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.kernels.windows import Window
from lightning_lowbit.nn.core.inputs import refuse_batches
from lightning_lowbit.quant import Cast


def is_pixelwise(cast: Cast | None, channels: int) -> bool:
    """Returns whether quantizing pixels before they are gathered gives the same bits, with the same amax. So it is if
    scales belong to the tensor or to blocks within a pixel, rounding ignores places, and zeros stay zeros."""
    if cast is None or cast.draws or cast.scale.statistic != "absmax" or cast.scale.two_level == "row":
        return False
    block = cast.scale.block
    return block == "tensor" or (isinstance(block, int) and channels % block == 0)


class Images(torch.autograd.Function):
    """Does :meth:`Window.scatter`, with :meth:`Window.gather` as its gradient."""

    @staticmethod
    def forward(ctx: Any, patches: Tensor, window: Window, shape: tuple[int, ...], layer: str) -> Tensor:
        ctx.window, ctx.layer = window, layer
        return window.scatter(patches, shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_batches(ctx.layer, g)
        return ctx.window.gather(g), None, None, None
