"""Operands of many matrices at once, one for each head of each sequence, by the casts of a layer's six operands.

    x and g    [rows, n, features]      of n matrices [rows, features]
    w          [n, out, in]             of n matrices [out, in]

Operands are ``[n, rows, features]`` and ``[n, out, in]``. A cast meets one matrix: for a contraction along features
``[rows * n, features]`` or ``[n * out, in]``, for one along rows ``[rows, n * features]`` or ``[out, n * in]``. Scales
of tensors are those of all n matrices; random bits depend on an element's place in that one matrix.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.compilation import counted_for
from lightning_lowbit.kernels import quantize_operand, rotate
from lightning_lowbit.nn.casts.plan import CONTRACTION, GEMM, INDEX, OPERANDS_OF
from lightning_lowbit.nn.core.operands import Settings
from lightning_lowbit.quant import Cast, Operand, blend
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.statistics import MAXIMA, SUMS, merge_statistics_, operand_statistics


def of_rows(name: str, x: Tensor, settings: Settings, amax: Tensor | None = None, tile: Any = None) -> Operand:
    """The operand of x or g of a name. ``tile`` is the index of its first row, and the number of all rows and of those
    in a tile, where ``x`` is a tile of the rows; None where it is all of them."""
    rows, n, features = x.shape
    along_features = CONTRACTION[name] == 1
    flat = x.reshape(rows * n, features) if along_features else x.reshape(rows, n * features)
    shard = None
    if tile is not None:
        first, step, size = (number * n if along_features else number for number in tile)
        shard = Shard("", 0, first, step, size)
    values, factor = _quantized(name, flat, settings, amax, shard)
    if along_features:
        values = values.view(rows, n, -1).transpose(0, 1)
        return Operand(values, _view(factor, rows, n, 1, transposed=True))
    return Operand(values.view(len(values), n, features).transpose(0, 1), _view(factor, n, 1, features))


def of_weights(name: str, w: Tensor, settings: Settings) -> Operand:
    """The operand of w of a name, padded inside so that no two matrices lie in one block."""
    n, out, features = w.shape
    cast = getattr(settings.casts, name)
    if CONTRACTION[name] == 1:
        w = _padded(w, 1, cast)
        values, factor = _quantized(name, w.reshape(-1, features), settings)
        factor = _view(factor, n, -1, 1)
        values = values.view(n, w.shape[1], -1)[:, :out]
        return Operand(values, factor if factor is None or not factor.dim() else factor[:, :out])
    w = _padded(w, 2, cast).transpose(0, 1)
    values, factor = _quantized(name, w.reshape(out, -1), settings)
    values, factor = values.view(len(values), n, -1).transpose(0, 1)[..., :features], _view(factor, n, 1, w.shape[-1])
    return Operand(values, factor if factor is None or not factor.dim() else factor[..., :features])


def decoded(operand: Operand) -> Operand:
    """With a factor of rows in the values, in float32, for a contraction along them."""
    if operand.factor is None or not operand.factor.dim():
        return operand
    return Operand(operand.values.float() * operand.factor)


def part(operand: Operand, dim: int, start: int, end: int) -> Operand:
    """The rows (``dim=1``) or columns (2) of an operand from ``start`` to ``end``."""

    factor = operand.factor
    if factor is not None and factor.dim() and factor.shape[dim] > 1:
        factor = factor.narrow(dim, start, end - start)
    return Operand(operand.values.narrow(dim, start, end - start), factor)


def multiply(left: Operand, right: Operand, dtype: torch.dtype, owner: tuple[Any, ...]) -> Tensor:
    """``left · right`` for ``[n, rows, k]`` and ``[n, k, columns]``, summed and returned in ``dtype``, float32 or
    wider. ``owner``: the arguments of :func:`lightning_lowbit.compilation.counted_for`."""
    a, b = left.values, right.values
    with counted_for(*owner):
        if a.is_cuda and dtype == torch.float32 and a.dtype == b.dtype == torch.bfloat16:
            product = torch.bmm(a, b, out_dtype=torch.float32)
        else:
            product = torch.bmm(a.to(dtype), b.to(dtype))
    for factor in (left.factor, right.factor):
        product = product if factor is None else product * factor
    return product


def transposed(operand: Operand) -> Operand:
    factor = operand.factor
    return Operand(operand.values.mT, factor if factor is None or not factor.dim() else factor.mT)


def _quantized(
    name: str, x: Tensor, settings: Settings, amax: Tensor | None = None, shard: Shard | None = None
) -> Operand:
    casts, i, dim, sums = settings.casts, INDEX[name], CONTRACTION[name], settings.operand_sums
    cast = getattr(casts, name)
    if not isinstance(cast, Cast):
        return Operand(x)
    if GEMM[name] in casts.hadamard:  # signs come from the key of the second operand, so that both agree
        of_signs = None if settings.keys is None else settings.keys[INDEX[OPERANDS_OF[GEMM[name]][1]]]
        signs = casts.hadamard[GEMM[name]].diagonal(of_signs, x.device)
        x, amax = rotate(x, signs, dim), None  # not that of what is rotated
    key = None if settings.keys is None else settings.keys[i]
    amax = amax if cast.scale.needs_amax else None
    wide = torch.float32 if settings.exact else None
    quantized = quantize_operand(x.contiguous(), cast, dim, key, amax, wide, shard if cast.draws else None)
    if sums is not None:
        of_blocks = len(sums[i]) > len(SUMS) + len(MAXIMA)
        merge_statistics_(sums[i], operand_statistics(x, quantized, cast, dim, amax, of_blocks=of_blocks))
    return quantized if settings.blend is None else blend(x, quantized, settings.blend, settings.exact)


def _view(factor: Tensor | None, *shape: int, transposed: bool = False) -> Tensor | None:
    if factor is None or not factor.dim():
        return factor
    return factor.view(shape).transpose(0, 1) if transposed else factor.view(shape)


def _padded(w: Tensor, dim: int, cast: Any) -> Tensor:
    block = cast.scale.block if isinstance(cast, Cast) else None
    missing = -w.shape[dim] % block[dim - 1] if isinstance(block, tuple) else 0
    return F.pad(w, (0, missing) if dim == 2 else (0, 0, 0, missing)) if missing else w
