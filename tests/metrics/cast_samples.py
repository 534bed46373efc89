"""Tensors whose metrics under a cast are known."""

import torch

from lightning_lowbit import Cast, Scale

CASTS = [
    Cast("e2m1", Scale("e4m3", 16, two_level=True)),
    Cast("e2m1", Scale("e4m3", (4, 16), two_level=True)),
    Cast("e2m1", Scale("e4m3", 16, "up")),
    Cast("e2m1", Scale("e8m0", 32)),
    Cast("e1m2", Scale("e8m0", 32, "floor")),
    Cast("int4", Scale("fp32", 24)),
    Cast("ternary", Scale("fp32", "row")),
    Cast("e4m3", Scale("fp32", "tensor")),
]


# With a zero point: of a block, a tile, a row and the tensor.
ZERO_POINTS = [
    Cast("int4", Scale("fp32", 24, statistic="minmax")),
    Cast("int2", Scale("fp32", (4, 16), statistic="minmax")),
    Cast("int8", Scale("fp32", "row", statistic="minmax")),
    Cast("int3", Scale("fp32", "tensor", statistic="minmax", factor=0.7)),
]


def sample(*shape, seed=0, dtype=torch.float32):
    """Rows of very different sizes, so that scales saturate and underflow; zeros among them, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator).mul(4).exp()
    x[torch.rand(shape, generator=generator) < 0.1] = 0
    x[shape[0] // 2] = 0
    return x.to(dtype)


def unit_of(quantized, row, column):
    """The block of an element, as an index of its scale, and what a level of 1 stands for there, as it is stored."""
    scale, scales = quantized.cast.scale, quantized.scales
    scales = scales.double() if scale.storage.dtype is not None else scale.storage.decode(scales).double()
    height, width = scale.block if isinstance(scale.block, tuple) else (1, scale.block)
    if isinstance(width, str):
        height, width = (1, 10**9) if width == "row" else (10**9, 10**9)
    block = row // height, column // width
    return block, scales[block].item() * (1.0 if quantized.tensor_scale is None else quantized.tensor_scale.item())
