"""Kernels around the casts of a layer: amaxes of delayed scaling before them, operands in the order of GEMMs, factors,
bias and rounding of a GEMM's result after them, and sums over patches of images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_lowbit.compilation import compiled
from lightning_lowbit.kernels import layout
from lightning_lowbit.kernels.cpu import casts as cpp_casts
from lightning_lowbit.kernels.cpu import products as cpp
from lightning_lowbit.kernels.cpu.casts import INPUTS, OUTPUTS
from lightning_lowbit.kernels.forms import amax_sample, bytes_form, bytes_sample, product_form, product_sample
from lightning_lowbit.kernels.gpu import casts as triton
from lightning_lowbit.kernels.memory import resolved
from lightning_lowbit.kernels.ops import Operation, run


def plain_scale_and_round(product: Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Does :func:`scale_and_round` by plain code; float64 products are computed in float64."""

    def view(tensor: Tensor) -> Tensor:  # for `compiled`: [m, 1, n], with sizes of 1 where it broadcasts
        if tensor.dim() == 3:  # of products with as many rows each
            tensor = tensor.expand(-1, len(product) // len(tensor), -1).flatten(0, 1)
        return tensor.reshape([1] * (2 - tensor.dim()) + list(tensor.shape)).unsqueeze(1)

    others = [view(tensor) for tensor in (*factors, bias) if tensor is not None]
    return _scale(view(product), *others, biased=bias is not None, dtype=dtype).squeeze(1)


@compiled
def _scale(product: Tensor, *others: Tensor, biased: bool, dtype: torch.dtype) -> Tensor:
    factors, biases = (others[:-1], others[-1:]) if biased else (others, ())
    result = product if product.dtype == torch.float64 else product.float()
    for factor in factors:  # one by one, because their product may overflow or underflow
        result = result * factor
    for bias in biases:
        result = result + bias
    return result.to(dtype)


def _no_plain_code(*arguments: object) -> None:
    """Stands for plain code that lies with the caller, in ``nn``."""


SCALE_AND_ROUND = Operation(
    "the results of GEMMs",
    plain_scale_and_round,
    cpp.scale_and_round,
    triton.scale_and_round,
    product_form,
    product_sample,
)
DELAY = Operation("delayed scaling", _no_plain_code, cpp_casts.delayed_amax, triton.delayed_amax, sample=amax_sample)
PAD = Operation("copies for GEMMs", layout.pad, triton=triton.pad_bytes, form=bytes_form, sample=bytes_sample)
ADD_PATCHES = Operation("sums over patches", _no_plain_code, cpp.add_patches)


def scale_and_round(product: Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns ``product * factors + bias``, computed in float32 and rounded once to ``dtype``.

    Args:
        product: ``[m, n]``, or the values of an operand; kernels take float32, bfloat16, int8 and int32.
        factors: at most two, float32, 0-d, ``[m, 1]`` or ``[1, n]``, multiplied one by one; for products below each
            other perhaps one ``[products, 1, n]``.
        bias: a tensor that broadcasts to ``[m, n]``, or None.
    """
    return run(SCALE_AND_ROUND, product, [resolved(factor) for factor in factors], resolved(bias), dtype)


def decode(values: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the values of an operand times its factor, computed in float32 and rounded once to ``dtype``."""
    if factor is None:
        return values.to(dtype)
    if torch.compiler.is_compiling() or values.dim() != 2 or values.dtype not in OUTPUTS or dtype not in INPUTS:
        return (values.float() * factor).to(dtype)
    return scale_and_round(values, [factor], None, dtype)


def pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Returns a contiguous matrix of one-byte elements, with zeros below and to the right, by the fastest code."""
    if not rows and not columns and matrix.is_contiguous() and 1 not in matrix.shape:
        return matrix  # a single row or column may lack the strides that GEMMs need
    return run(PAD, matrix, rows, columns)


def delayed_amax(amax: Tensor, in_force: Tensor, staged: Tensor | None, places: Sequence[int]) -> Tensor | None:
    """Returns the amax that scales an operand with delayed scaling: the one in force, or its own while there is none.

    Args:
        amax: float32, 0-d: max|x| of the operand. A new tensor is returned.
        in_force: float32 ``[6]``, of a layer's operands; 0 where there is none.
        staged: float32 ``[6]``, of the current step, raised in place to ``amax`` where that is finite; None to record
            nothing.
        places: of the operand in both tensors; then of the operands that reuse it, and are recorded with it.

    Returns:
        float32, 0-d; None, and nothing has happened, where no kernel does it.

    Examples:
        >>> delayed_amax(torch.tensor(3.0), torch.zeros(6), torch.zeros(6), [1, 3])
        tensor(3.)
    """
    if torch.compiler.is_compiling():
        return None
    count, device = in_force.numel(), amax.device
    is_covered = _is_plain(amax, 1, device) and _is_plain(in_force, count, device)
    is_covered &= staged is None or _is_plain(staged, count, device)
    if not is_covered or not 0 <= min(places) <= max(places) < count:
        return None
    return run(DELAY, amax, in_force, staged, places)


def _is_plain(tensor: Tensor, elements: int, device: torch.device) -> bool:
    """Returns whether kernels may touch so many elements of a tensor, of float32 and on this device."""
    is_dense = type(tensor) is Tensor and tensor.dtype == torch.float32 and tensor.is_contiguous()
    return is_dense and tensor.numel() == elements and tensor.device == device and not tensor.is_neg()


def add_patches(patches: Tensor, images: int, channels: int, dimensions: Sequence[Sequence[int]]) -> Tensor | None:
    """Images ``[images, *sizes, channels]`` whose pixels are sums over the patches that hold them, in float32 and in
    the order of the kernel, rounded once to the dtype of ``patches``; None where no kernel does it.

    Args:
        patches: ``[images · positions, kernel · channels]``.
        dimensions: of each dimension of space its size, the number of positions, and size, stride and dilation of the
            kernel, and the zeros before the image.
    """
    if torch.compiler.is_compiling() or patches.numel() == 0:
        return None
    return run(ADD_PATCHES, patches, images, channels, dimensions)
