"""Fake quantization by the reference: quantized and dequantized, with a gradient that passes straight through."""

from typing import Any

import torch
from torch import Tensor

from tests.references.quantize import quantize


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: Any, dim: int) -> Tensor:
        return quantize(x, cast, dim, field="dequantized").to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def fake_quantize(x: Tensor, cast: Any, dim: int = -1) -> Tensor:
    """Quantized and dequantized; the gradient passes straight through."""
    return _FakeQuantize.apply(x, cast, dim)
