"""Operands of many matrices at once, one for each head of each sequence, by the casts of a layer's six operands.

    x and g    [rows, n, features]      of n matrices [rows, features]
    w          [n, out, in]             of n matrices [out, in]

Operands are ``[n, rows, features]`` and ``[n, out, in]``. A cast meets one matrix: for a contraction along features
``[rows * n, features]`` or ``[n * out, in]``, for one along rows ``[rows, n * features]`` or ``[out, n * in]``. Scales
of tensors are those of all n matrices; random bits depend on an element's place in that one matrix.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.compilation import counted_for
from lightning_lowbit.kernels.products import decode
from lightning_lowbit.nn.core.how import How
from lightning_lowbit.nn.core.operands import OperandHow, OperandInput, Pass
from lightning_lowbit.nn.native.operand import values_of
from lightning_lowbit.quant import Operand
from lightning_lowbit.quant.shard import Shard


class ProductPass(NamedTuple):
    """A pass of one of attention's two products: its ``How``, its ``Pass``, and the ``id`` of the product's layer."""

    how: How
    pass_: Pass
    layer: int

    def unrecorded(self) -> "ProductPass":
        """Returns a pass for operands that the forward pass has recorded."""
        return self._replace(pass_=self.pass_.unrecorded())

    def row_operand(self, name: str, x: Tensor, amax: Tensor | None = None, tile: Any = None) -> Operand:
        """Quantizes an operand of x or g ``[rows, n, features]`` by an ``amax`` (float32, 0-d; None for its own).

        ``tile`` tells where ``x`` is a tile of the rows: the index of its first row, the rows of a tile, and all rows.
        """
        operand, (rows, n, features) = self.how.operands[name], x.shape
        along_features = operand.dim == 1
        flat = x.reshape(rows * n, features) if along_features else x.reshape(rows, n * features)
        shard = None
        if tile is not None and operand.cast is not None and operand.cast.draws:
            first, step, size = (number * n if along_features else number for number in tile)
            shard = Shard("", 0, first, step, size)
        values, factor = self._quantized(operand, flat, amax, shard)
        if along_features:
            values = values.view(rows, n, -1).transpose(0, 1)
            return Operand(values, _view(factor, rows, n, 1, transposed=True))
        return Operand(values.view(len(values), n, features).transpose(0, 1), _view(factor, n, 1, features))

    def weight_operand(self, name: str, w: Tensor) -> Operand:
        """Quantizes an operand of w ``[n, out, features]``, padded inside so that no two matrices lie in one block."""
        operand, (n, out, features) = self.how.operands[name], w.shape
        if operand.dim == 1:
            w = _padded(w, 1, operand)
            values, factor = self._quantized(operand, w.reshape(-1, features))
            result = Operand(values.view(n, w.shape[1], -1), _view(factor, n, -1, 1))
            return cut_operand(result, 1, 0, out, w.shape[1])
        w = _padded(w, 2, operand).transpose(0, 1)
        values, factor = self._quantized(operand, w.reshape(out, -1))
        result = Operand(values.view(len(values), n, -1).transpose(0, 1), _view(factor, n, 1, w.shape[-1]))
        return cut_operand(result, 2, 0, features, w.shape[-1])

    def _quantized(
        self, operand: OperandHow, x: Tensor, amax: Tensor | None = None, shard: Shard | None = None
    ) -> Operand:
        source = OperandInput(x if operand.cast is None else x.contiguous(), amax)
        if operand.transform is not None:
            source = operand.with_rotation(source, operand.signs(self.pass_, x.device))
        return values_of(operand.operand(source, self.pass_, shard))

    def multiply(self, gemm: str, left: Operand, right: Operand, dtype: torch.dtype, again: bool = False) -> Tensor:
        """Multiplies ``[n, rows, k]`` and ``[n, k, columns]``, with sums and result in ``dtype``, float32 or wider.

        It is counted as a GEMM of this name, maybe ``again`` (:func:`lightning_lowbit.compilation.counted_for`).
        """
        a, b = left.values, right.values
        with counted_for(self.layer, gemm, again):
            if a.is_cuda and dtype == torch.float32 and a.dtype == b.dtype == torch.bfloat16:
                product = torch.bmm(a, b, out_dtype=torch.float32)
            else:
                product = torch.bmm(a.to(dtype), b.to(dtype))
        for factor in (left.factor, right.factor):
            product = product if factor is None else product * factor
        return product


def decoded(operand: Operand) -> Operand:
    """Multiplies a factor of rows into the values, in float32, for a contraction along them."""
    if operand.factor is None or not operand.factor.dim():
        return operand
    return Operand(decode(operand.values, operand.factor, torch.float32))


def cut_operand(operand: Operand, dim: int, start: int, end: int, size: int) -> Operand:
    """Cuts the rows (``dim=1``) or columns (2) of an operand from ``start`` to ``end``, unless these are all ``size``:
    uncut, it keeps the padding that a rotation added."""
    if end - start == size:
        return operand
    factor = operand.factor
    if factor is not None and factor.dim() and factor.shape[dim] > 1:
        factor = factor.narrow(dim, start, end - start)
    return Operand(operand.values.narrow(dim, start, end - start), factor)


def transposed(operand: Operand) -> Operand:
    factor = operand.factor
    return Operand(operand.values.mT, factor if factor is None or not factor.dim() else factor.mT)


def _view(factor: Tensor | None, *shape: int, transposed: bool = False) -> Tensor | None:
    if factor is None or not factor.dim():
        return factor
    return factor.view(shape).transpose(0, 1) if transposed else factor.view(shape)


def _padded(w: Tensor, dim: int, operand: OperandHow) -> Tensor:
    block = None if operand.cast is None else operand.cast.scale.block
    missing = -w.shape[dim] % block[dim - 1] if isinstance(block, tuple) else 0
    return F.pad(w, (0, missing) if dim == 2 else (0, 0, 0, missing)) if missing else w
