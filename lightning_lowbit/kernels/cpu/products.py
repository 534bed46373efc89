"""Factors, bias and rounding of the results of GEMMs by the C++ kernels."""

import torch
from torch import Tensor

from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.memory import start

# The numbers of dtypes in source/products.cpp.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_PRODUCTS = {torch.float32: 0, torch.int32: 2}


def finish(product: Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """:func:`lightning_lowbit.kernels.products.finish` on a CPU, of resolved tensors; None where no kernel does it."""
    kernels = library()
    if kernels is None or product.dim() != 2:
        return None
    rows, columns = product.shape
    extents = [_extent(factor, rows, columns) for factor in factors]
    is_covered = product.dtype in _PRODUCTS and dtype in _DTYPES and 0 not in extents and len(factors) <= 2
    is_covered &= bias is None or (bias.dtype in _DTYPES and bias.is_cpu and bias.numel() == columns == bias.shape[-1])
    if not is_covered:
        return None
    product, result = product.contiguous(), product.new_empty((rows, columns), dtype=dtype)
    factors, bias = [factor.contiguous() for factor in factors], None if bias is None else bias.contiguous()
    pairs = [value for factor, extent in zip(factors, extents, strict=True) for value in (start(factor), extent)]
    arguments = [*pairs, None, 0, None, 0]
    kernels.lowbit_finish(
        start(product),
        _PRODUCTS[product.dtype],
        rows,
        columns,
        *arguments[:4],
        None if bias is None else start(bias),
        0 if bias is None else _DTYPES[bias.dtype],
        start(result),
        _DTYPES[dtype],
        torch.get_num_threads(),
    )
    return result


def _extent(factor: Tensor, rows: int, columns: int) -> int:
    """``Extent`` in source/products.cpp; 0 for what is not covered."""
    if factor.dtype != torch.float32 or not factor.is_cpu:
        return 0
    if factor.numel() == 1:
        return 1
    if factor.shape == (rows, 1):
        return 2
    return 3 if factor.shape == (1, columns) else 0
