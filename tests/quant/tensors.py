"""What tests of casts share: samples, every setting of a scale, and equality that says what differs."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit import Cast, Scale
from lightning_lowbit.formats import SCALE_FORMATS
from lightning_lowbit.quant import Quantized
from lightning_lowbit.quant.cast import SCALE_ROUNDINGS

NVFP4 = Cast("e2m1", Scale("e4m3", 16, two_level=True))
NVFP4_TILES = Cast("e2m1", Scale("e4m3", (16, 16), two_level=True))
EXMY = [name for name in SCALE_FORMATS if name not in ("e8m0", "fp32")]


def scales(block: Any = 16, element: str = "e2m1") -> Iterator[Scale]:
    """Every setting of a Scale that this block and this element allow; of the numbers, one each."""
    levels = ({},) if block == "tensor" else ({}, {"two_level": True}, {"two_level": True, "top": 1.25})
    for name, level in itertools.product(EXMY, levels):
        for rounding in SCALE_ROUNDINGS[name]:
            yield Scale(name, block, rounding, **level)
        if element == "e2m1" and block not in ("row", "tensor"):
            yield from (Scale(name, block, four_over_six=measure, **level) for measure in ("mse", "mae"))
    for rounding, level in itertools.product(SCALE_ROUNDINGS["e8m0"], levels):
        yield Scale("e8m0", block, rounding, **level)
    yield Scale("e8m0", block, "floor", prescale=0.75)
    yield from (Scale("fp32", block, rounding, margin=m) for rounding in SCALE_ROUNDINGS["fp32"] for m in (0, 2))


def casts(element: str, block: Any = 16, **fields: Any) -> list[Cast]:
    """The casts of an element format with each of :func:`scales`."""
    return [Cast(element, scale, **fields) for scale in scales(block, element)]


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    size = torch.randn((*shape[:-1], 1), generator=generator).mul(3).exp()
    return (x * size * (torch.rand((*shape[:-1], 1), generator=generator) > 0.1)).to(dtype)


def same(found: Tensor, expected: Tensor, message: str) -> None:
    """Equal values: NaN equals NaN, and -0 equals 0."""
    assert found.shape == expected.shape, f"{message}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    wrong = (found != expected) & ~(found.isnan() & expected.isnan())
    assert not wrong.any(), (
        f"{message}: {int(wrong.sum())} of {wrong.numel()} differ, e.g. {found[wrong][:4].tolist()} "
        f"instead of {expected[wrong][:4].tolist()}"
    )


def same_bytes(found: Quantized, expected: Quantized, message: str) -> None:
    same(found.codes, expected.codes, f"{message}, codes")
    same(found.scales.view(torch.uint8), expected.scales.view(torch.uint8), f"{message}, scales")
    assert (found.tensor_scale is None) == (expected.tensor_scale is None), f"{message}: one has no tensor scale"
    if found.tensor_scale is not None:
        same(found.tensor_scale, expected.tensor_scale, f"{message}, tensor scale")


def float_scales(quantized: Quantized) -> Tensor:
    storage = quantized.cast.scale.storage
    return quantized.scales.float() if storage.dtype is not None else storage.decode(quantized.scales)


def spread_scales(quantized: Quantized) -> Tensor:
    """The scale of each element of a matrix, float32."""
    found, shape, block = float_scales(quantized), quantized.codes.shape, quantized.cast.scale.block
    if isinstance(block, str):
        return found.expand(shape)
    sides = block if isinstance(block, tuple) else (block, 1) if quantized.dim == -2 else (1, block)
    for dimension, side in enumerate(sides):
        found = found.repeat_interleave(side, dimension)
    return found[: shape[0], : shape[1]]
