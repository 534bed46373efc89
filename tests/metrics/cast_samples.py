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
