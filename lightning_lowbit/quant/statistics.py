"""What a cast did to an operand of a GEMM, in sums that are made while the operand is at hand.

With x the matrix, q what the GEMM takes of it and s the scales of its blocks, tensor scale included:

    elements, signal Σ x², noise Σ (x - q)², nonzero (x ≠ 0), underflowed (x ≠ 0, q = 0), saturated     add up
    1/s and s, the largest of each, of blocks of zeros left out; 0 where there are none                 maxima

Of large operands a sample of whole blocks is enough. See :mod:`lightning_lowbit.metrics.casts` for what the numbers
mean.
"""

import math
from typing import overload

import torch
from torch import Tensor

from lightning_lowbit.compilation import opaque
from lightning_lowbit.quant.blocks import block_dims, tile_of
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.part import Part, absmax_of
from lightning_lowbit.quant.quantize import Operand, scale_blocks
from lightning_lowbit.quant.scaling import block_amax, stored_scales

SUMS = ("elements", "signal", "noise", "nonzero", "underflowed", "saturated")
MAXIMA = ("inverse_scale", "scale")
_ADDED, _LARGEST = slice(len(SUMS)), slice(len(SUMS), None)

# Elements of an operand to look at, about: enough for an SQNR to some tenths of a decibel, whatever rows differ in.
SAMPLE = 2**15

# A largest magnitude is a product of scales, each rounded to float32: elements that it misses by so little fit.
_SLACK = 1 + 2.0**-20


def wide_dtype(device: torch.device) -> torch.dtype:
    """What sums over many elements are kept in."""
    return torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs lack


@overload
def sqnr_db(signal_power: Tensor, noise_power: Tensor) -> Tensor: ...


@overload
def sqnr_db(signal_power: float, noise_power: float) -> float: ...


def sqnr_db(signal_power: Tensor | float, noise_power: Tensor | float) -> Tensor | float:
    """Signal to quantization noise ratio in dB: ``10 log10(signal_power / noise_power)``; infinite without noise.

    Args:
        signal_power: Σ x², a number, or a tensor of any shape.
        noise_power: Σ (x - q)², likewise.
    """
    if isinstance(signal_power, Tensor) and isinstance(noise_power, Tensor):
        return torch.where(noise_power == 0, math.inf, 10 * torch.log10(signal_power / noise_power))
    ratio = signal_power / noise_power if noise_power != 0 else math.inf
    return 10 * math.log10(ratio) if ratio > 0 else ratio if math.isnan(ratio) else -math.inf


def operand_statistics(
    x: Tensor,
    quantized: Operand,
    cast: Cast,
    dim: int,
    amax: Tensor | None = None,
    most: int = SAMPLE,
    part: Part | None = None,
) -> Tensor:
    """What became of a matrix.

    Args:
        x, cast, dim, amax: as :func:`lightning_lowbit.quant.quantize_operand` took them.
        quantized: what it gave.
        most: elements to look at, about: of more, one of n rows, columns or rows of tiles is a sample, always the
            same. A scale that is the mean magnitude, or the range, of the whole matrix needs all of it.
        part: as it was quantized; these are then the statistics of the part.

    Returns:
        float64 (float32 on Apple's GPUs) ``[8]``, in the order of ``SUMS`` and ``MAXIMA``, on the device of ``x``. A
        block that holds a NaN or an infinity makes the noise NaN, and the counts meaningless.
    """
    spec = None if part is None else part.spec
    return _operand_statistics(x, quantized.values, quantized.factor, cast.spec, dim, amax, most, spec)


def merge_statistics_(into: Tensor, more: Tensor) -> None:
    """Adds sums to sums, and takes the larger maxima, in place: ``[..., 8]``."""
    into[..., _ADDED].add_(more[..., _ADDED])
    into[..., _LARGEST].copy_(torch.maximum(into[..., _LARGEST], more[..., _LARGEST]))


@opaque(
    lambda x, values, factor, spec, dim, amax, most, part: x.new_empty(
        len(SUMS) + len(MAXIMA), dtype=wide_dtype(x.device)
    )
)
def _operand_statistics(
    x: Tensor,
    values: Tensor,
    factor: Tensor | None,
    spec: str,
    dim: int,
    amax: Tensor | None,
    most: int,
    part: str | None,
) -> Tensor:
    cast, wide, known = Cast.from_spec(spec), wide_dtype(x.device), Part.from_spec(part)
    if cast.scale.needs_amax and amax is None:
        amax = absmax_of(x, known)
    whole = x.shape if known is None else known.whole(x.shape)  # of which all processes take the same rows or columns
    x, values = (sample(matrix, whole, cast, dim, most) for matrix in (x, values))
    factor = None if factor is None else sample(factor, whole, cast, dim, most)
    tile = tile_of(cast, dim, x.dim())
    blocks, scales, decode, zeros = scale_blocks(x, cast, tile, amax, known)
    if x.numel() == 0:  # an expert without tokens, or a process without a part, which the others have waited for
        return torch.zeros(len(SUMS) + len(MAXIMA), dtype=wide, device=x.device)
    step = stored_scales(scales, cast).float() * decode
    # What a block of zeros is scaled by says nothing: 1, or the least scale there is.
    used = (step > 0) & (block_amax(blocks, block_dims(blocks, tile)) > 0)
    largest = torch.where(used, step.reciprocal(), 0).amax(), torch.where(used, step, 0).amax()
    x, q = x.float(), values.float() if factor is None else values.float() * factor
    nonzero = torch.count_nonzero(x)
    sums = (
        torch.linalg.vector_norm(x).to(wide).square(),
        torch.linalg.vector_norm(x - q).to(wide).square(),
        nonzero.to(wide),
        (nonzero - torch.count_nonzero(q)).to(wide),  # zeros stay zeros
        torch.count_nonzero(_excess(blocks.float(), torch.where(step > 0, step, torch.inf), zeros, cast)).to(wide),
    )
    elements = torch.full((), x.numel(), dtype=wide, device=x.device)
    return torch.stack([elements, *sums, *(value.to(wide) for value in largest)])


def sample(tensor: Tensor, whole: torch.Size, cast: Cast, dim: int, most: int = SAMPLE) -> Tensor:
    """Of a matrix, or a factor of its rows or columns, what belongs to the sample.

    Args:
        tensor: ``[rows, columns]``, or a factor of them, see :class:`lightning_lowbit.quant.Operand`.
        whole: the shape of the matrix.
        cast, dim, most: as in :func:`operand_statistics`.

    Returns:
        Whole blocks, always the same ones: rows, columns or rows of tiles; the tensor itself where it is small, or
        where a scale needs all of it.
    """
    stride, block = -(-whole.numel() // most), cast.scale.block
    if tensor.dim() == 0 or stride <= 1 or (block == "tensor" and not cast.scale.needs_amax):
        return tensor
    if isinstance(block, tuple):
        size = block[0]
        if whole[0] < 2 * size or len(tensor) == 1:
            return tensor
        tiles = tensor[: len(tensor) // size * size].reshape(-1, size, tensor.shape[1])
        return _each(tiles, stride, 0).flatten(0, 1)
    along = 1 if dim in (0, -2) else 0
    return tensor if tensor.shape[along] == 1 else _each(tensor, stride, along)


def _each(tensor: Tensor, stride: int, dim: int) -> Tensor:
    """One slice of each ``stride``, not always the same one: rows are tokens, and what is special about some of them,
    such as the first ones of sequences, comes back at regular distances."""
    count = -(-tensor.shape[dim] // stride)
    stratum = torch.arange(count, device=tensor.device)
    offset = (stratum * 2654435761 % 2**32) * stride // 2**32  # Knuth's multiplicative hash
    return tensor.index_select(dim, (stratum * stride + offset).clamp_(max=tensor.shape[dim] - 1))


def _excess(blocks: Tensor, step: Tensor, zeros: Tensor | None, cast: Cast) -> Tensor:
    """How far elements lie beyond the levels of their block, 0 where they do not.

    Differences, since comparisons of tensors are several times slower on CPUs.
    """
    if zeros is None:
        return (blocks.abs() - cast.grid.max * _SLACK * step).relu_()
    below = (-zeros * step * _SLACK - blocks).relu_()
    return below.add_((blocks - (cast.grid.max - zeros) * step * _SLACK).relu_())
