"""Statistics of the errors of a cast, on a sample of whole blocks of a large operand.

With x the matrix, q its quantized values and s the scales of its blocks, tensor scale included:

    sums      elements, signal Σ x², noise Σ (x - q)², nonzero (x ≠ 0), underflowed (x ≠ 0, q = 0), saturated
    maxima    1/s and s over blocks that are not all zero; 0 if there are none
    of blocks their number (not all zero), Σ s, Σ s², and two histograms: of the powers of two by which s is below the
              largest, and of Σ x² / Σ (x - q)² of each block, in steps of 3 dB from 0; optional
"""

import math
from typing import TypeVar

import torch
from torch import Tensor

from lightning_lowbit._torch.devices import wide_dtype
from lightning_lowbit.compilation import opaque
from lightning_lowbit.quant.blocks import block_dims, tile_of, to_blocks
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import Operand
from lightning_lowbit.quant.scales import block_amax, stored_scales
from lightning_lowbit.quant.scaling import make_scales
from lightning_lowbit.quant.shard import Shard, amax_of

SUMS = ("elements", "signal", "noise", "nonzero", "underflowed", "saturated")
MAXIMA = ("inverse_scale", "scale")
BINS = 16  # of each histogram; the last one holds all beyond
OF_BLOCKS = 3 + 2 * BINS
_SIZE = len(SUMS) + len(MAXIMA)
_ADDED, _MAXIMA, _BLOCKS = slice(len(SUMS)), slice(len(SUMS), _SIZE), slice(_SIZE, None)

_Number = TypeVar("_Number", Tensor, float)

# Elements to measure, about: enough for an SQNR to some tenths of a decibel, even if rows differ.
SAMPLE = 2**15

# The largest level is a product of scales, each rounded to float32. Elements that exceed it by less are not saturated.
_SLACK = 1 + 2.0**-20


def sqnr_db(signal_power: _Number, noise_power: _Number) -> _Number:
    """Returns ``10 log10(signal_power / noise_power)`` of Σ x² and Σ (x - q)², numbers or tensors; ∞ without noise."""
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
    shard: Shard | None = None,
    of_blocks: bool = False,
) -> Tensor:
    """Statistics of a matrix that :func:`lightning_lowbit.quant.quantize_operand` quantized, for a shard of it alone.

    ``most`` is how many elements to measure, about. Returns ``[8]`` in :func:`wide_dtype`, in the order of ``SUMS`` and
    ``MAXIMA``; with ``of_blocks`` ``OF_BLOCKS`` numbers of the blocks follow. A block with a NaN or an infinity makes
    the noise NaN and the counts meaningless. Scales that round stochastically are measured as if to nearest.
    """
    spec = None if shard is None else shard.spec
    return _operand_statistics(x, quantized.values, quantized.factor, cast.spec, dim, amax, most, spec, of_blocks)


def merge_statistics_(into: Tensor, more: Tensor) -> None:
    """Adds the sums and takes the larger maxima, in place: ``[..., 8]``, or more with statistics of blocks."""
    into[..., _ADDED].add_(more[..., _ADDED])
    into[..., _BLOCKS].add_(more[..., _BLOCKS])
    into[..., _MAXIMA].copy_(torch.maximum(into[..., _MAXIMA], more[..., _MAXIMA]))


@opaque(
    lambda x, values, factor, spec, dim, amax, most, shard, of_blocks: x.new_empty(
        _SIZE + of_blocks * OF_BLOCKS, dtype=wide_dtype(x.device)
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
    shard: str | None,
    of_blocks: bool,
) -> Tensor:
    cast, wide = Cast.from_spec(spec), wide_dtype(x.device)
    part = None if shard is None else Shard.from_spec(shard)
    if cast.scale.needs_amax and amax is None:
        amax = amax_of(x, part)
    shape = x.shape if part is None else part.global_shape(x.shape)  # all processes take the same sample
    x, values = (sample(matrix, shape, cast, dim, most) for matrix in (x, values))
    factor = None if factor is None else sample(factor, shape, cast, dim, most)
    tile = tile_of(cast, dim, x.dim())
    # Without a key, as if scales rounded to nearest.
    blocks, scales, decode, zeros, _ = make_scales(x, CastCall(cast, dim, amax=amax, shard=part))
    if x.numel() == 0:  # an expert without tokens, or a process without a shard, which took part in the collectives
        return torch.zeros(_SIZE + of_blocks * OF_BLOCKS, dtype=wide, device=x.device)
    step, dims = stored_scales(scales, cast) * decode, block_dims(blocks, tile)
    # The scale of a block of zeros is arbitrary: 1, or the smallest scale.
    used = (step > 0) & (block_amax(blocks, dims) > 0)
    inverse_and_scale = torch.where(used, step.reciprocal(), 0).amax(), torch.where(used, step, 0).amax()
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
    statistics = torch.stack([elements, *sums, *(value.to(wide) for value in inverse_and_scale)])
    if not of_blocks:
        return statistics
    signal = blocks.float().square().sum(dims, keepdim=True)
    noise = (blocks.float() - to_blocks(q, tile)).square().sum(dims, keepdim=True)
    return torch.cat([statistics, _block_numbers(step.to(wide), used, inverse_and_scale[1], sqnr_db(signal, noise))])


def _block_numbers(step: Tensor, used: Tensor, largest: Tensor, sqnr: Tensor) -> Tensor:
    """Returns ``[OF_BLOCKS]``: how many blocks, sum and sum of squares of their scales, and the histograms."""
    step, counted = torch.where(used, step, 0), used.to(step.dtype)
    below = torch.where(used, torch.log2(largest / torch.where(used, step, 1)), 0)
    places = [value.floor().nan_to_num(nan=0.0).clamp(0, BINS - 1).long() for value in (below, sqnr / 3)]
    empty = torch.zeros(BINS, dtype=step.dtype, device=step.device)
    bins = [empty.scatter_add(0, place.flatten(), counted.flatten()) for place in places]
    return torch.cat([torch.stack([counted.sum(), step.sum(), step.square().sum()]), *bins])


def sample(tensor: Tensor, shape: torch.Size, cast: Cast, dim: int, most: int = SAMPLE) -> Tensor:
    """Returns the sampled part of a matrix, or of a factor of its rows or columns; ``shape`` is that of the global
    matrix. It has whole blocks, always the same ones: rows, columns or rows of tiles. A small tensor is returned whole,
    and so is one whose single scale is made from the mean magnitude or range."""
    stride, block = -(-shape.numel() // most), cast.scale.block
    if tensor.dim() == 0 or stride <= 1 or (block == "tensor" and not cast.scale.needs_amax):
        return tensor
    if isinstance(block, tuple):
        size = block[0]
        if shape[0] < 2 * size or len(tensor) == 1:
            return tensor
        tiles = tensor[: len(tensor) // size * size].reshape(-1, size, tensor.shape[1])
        return _each(tiles, stride, 0).flatten(0, 1)
    along = 1 if dim in (0, -2) else 0
    return tensor if tensor.shape[along] == 1 else _each(tensor, stride, along)


def _each(tensor: Tensor, stride: int, dim: int) -> Tensor:
    """One slice of each ``stride``, at a hashed offset: special rows (first tokens) recur at regular distances."""
    count = -(-tensor.shape[dim] // stride)
    stratum = torch.arange(count, device=tensor.device)
    offset = (stratum * 2654435761 % 2**32) * stride // 2**32  # Knuth's multiplicative hash
    return tensor.index_select(dim, (stratum * stride + offset).clamp_(max=tensor.shape[dim] - 1))


def _excess(blocks: Tensor, step: Tensor, zeros: Tensor | None, cast: Cast) -> Tensor:
    """Returns the distance of elements from the range of their block, else 0. On CPUs this is faster than comparing."""
    if zeros is None:
        return (blocks.abs() - cast.grid.max * _SLACK * step).relu_()
    below = (-zeros * step * _SLACK - blocks).relu_()
    return below.add_((blocks - (cast.grid.max - zeros) * step * _SLACK).relu_())
