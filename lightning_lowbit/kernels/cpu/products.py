"""The C++ kernels of :mod:`lightning_lowbit.kernels.products`; they return None for arguments that they do not take."""

import ctypes
import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from lightning_lowbit.kernels.cpu.casts import INPUTS, OUTPUTS
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.memory import address, start

_PRODUCTS = {**OUTPUTS, torch.int32: 3}


def scale_and_round(product: Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    kernels = library()
    if kernels is None or product.dim() != 2:
        return None
    rows, columns = product.shape
    extents = [_extent(factor, rows, columns) for factor in factors]
    is_covered = product.dtype in _PRODUCTS and dtype in INPUTS and 0 not in extents and len(factors) <= 2
    is_covered &= bias is None or (bias.dtype in INPUTS and bias.is_cpu and bias.numel() == columns == bias.shape[-1])
    if not is_covered:
        return None
    product, result = product.contiguous(), product.new_empty((rows, columns), dtype=dtype)
    factors, bias = [factor.contiguous() for factor in factors], None if bias is None else bias.contiguous()
    pairs = [value for factor, extent in zip(factors, extents, strict=True) for value in (start(factor), extent)]
    arguments = [*pairs, None, 0, None, 0]
    kernels.lowbit_scale_and_round(
        start(product),
        _PRODUCTS[product.dtype],
        rows,
        columns,
        *arguments[:4],
        None if bias is None else start(bias),
        0 if bias is None else INPUTS[bias.dtype],
        start(result),
        INPUTS[dtype],
        torch.get_num_threads(),
    )
    return result


def _extent(factor: Tensor, rows: int, columns: int) -> int:
    """Returns ``Extent`` in source/products.cpp; 0 for a factor that is not covered."""
    if factor.dtype != torch.float32 or not factor.is_cpu:
        return 0
    if factor.numel() == 1:
        return 1
    if factor.shape == (rows, 1):
        return 2
    return 3 if factor.shape == (1, columns) else 0


class _Window(ctypes.Structure):
    """``Window`` of source/windows.h."""

    _fields_ = [("space", ctypes.c_int64 * 18), ("images", ctypes.c_int64)]


def window_of(images: int, dimensions: Sequence[Sequence[int]]) -> _Window:
    """Returns the structure for ``dimensions`` of space as in :func:`lightning_lowbit.kernels.products.add_patches`."""
    space = [*[(1, 1, 1, 1, 1, 0)] * (3 - len(dimensions)), *dimensions]
    return _Window((ctypes.c_int64 * 18)(*chain(*space)), images)


def add_patches(patches: Tensor, images: int, channels: int, dimensions: Sequence[Sequence[int]]) -> Tensor | None:
    kernels = library()
    if kernels is None or patches.dtype not in INPUTS or len(dimensions) > 3:
        return None
    if min(images, channels, *(number for row in dimensions for number in row[:5])) < 1:
        return None
    window = window_of(images, dimensions)
    patches, result = patches.contiguous(), patches.new_empty(images, *(row[0] for row in dimensions), channels)
    touched = images * channels * math.prod(row[1] * row[2] for row in dimensions)
    kernels.lowbit_add_patches(
        address("patches", patches, patches.dtype, touched),
        INPUTS[patches.dtype],
        start(result),
        channels,
        ctypes.addressof(window),
        torch.get_num_threads(),
    )
    return result
