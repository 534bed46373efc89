"""Statistics of operands and gradients that layers write to rows of one tensor while they compute.

    operand_sums    [6, 8] of a layer, with statistics of blocks [6, 43]: for each quantized operand, see
                    :mod:`lightning_lowbit.quant.statistics`
    gradient_sums   [2] of a layer: Σ (dW - dW')² and Σ dW'², dW' in high precision; doubles the GEMM of dW

Rows add up over passes and micro-batches, and one collective adds them over ranks. Without a row nothing is measured.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_lowbit.quant.statistics import MAXIMA, OF_BLOCKS, SUMS, wide_dtype

_SHAPES: dict[str, tuple[int, ...]] = {"operand_sums": (6, len(SUMS) + len(MAXIMA)), "gradient_sums": (2,)}


class Watch:
    """Rows for the statistics of converted layers, given by name. ``what`` is ``"operand_sums"`` or
    ``"gradient_sums"``; ``of_blocks`` adds statistics of blocks to the former.

    Attributes:
        sums: float64 (float32 on Apple's GPUs) ``[layers, 6, 8]`` or ``[layers, 2]``: of passes since the start.

    Examples:
        >>> watch = Watch({"up": model.up}, "operand_sums")
        >>> watch.start(torch.device("cpu"))
        >>> model(x).sum().backward()
        >>> watch.stop()
        >>> watch.sums
    """

    def __init__(
        self, layers: Mapping[str, Any], what: Literal["operand_sums", "gradient_sums"], of_blocks: bool = False
    ) -> None:
        self.layers, self._what = dict(layers), what
        *rows, size = _SHAPES[what]
        self.sums = torch.zeros(len(self.layers), *rows, size + of_blocks * OF_BLOCKS)

    def start(self, device: torch.device) -> None:
        """Empties the rows, and gives them to the layers."""
        device = torch.empty(0, device=device).device  # as tensors name it: cuda:0 for cuda
        if self.sums.device == device and self.sums.dtype == wide_dtype(device):
            self.sums.zero_()
        else:
            self.sums = torch.zeros_like(self.sums, dtype=wide_dtype(device), device=device)
        self.resume()

    def resume(self) -> None:
        """Gives the rows to the layers without emptying them."""
        for layer, row in zip(self.layers.values(), self.sums, strict=True):
            setattr(layer, self._what, row)

    def stop(self) -> None:
        """Takes the rows from the layers."""
        for layer in self.layers.values():
            # Restores the None of the class: an attribute of its own would recompile the layer.
            vars(layer).pop(self._what, None)


def add_gradients_(sums: Tensor, quantized: Tensor, exact: Tensor) -> None:
    exact = exact.float()
    norms = torch.stack([torch.linalg.vector_norm(quantized.float() - exact), torch.linalg.vector_norm(exact)])
    sums.add_(norms.to(sums.dtype).square())
