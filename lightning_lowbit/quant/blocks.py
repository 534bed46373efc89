"""A matrix cut into blocks that share a scale.

A tile is 1 x k for blocks along the rows of a matrix, and k x 1 along its columns. The *blocked view* has the sides of
a tile as dimensions 1 and 3, over which scales are reduced:

    [R, C]  ->  [R / k1, k1, C / k2, k2]         or, where a side is 1,   [R C / k, k]   and   [R / k, k, C]

For the scale of a whole row, column or tensor, the view is [R, 1, C] or [R C, 1], and an even dimension is reduced. Odd
dimensions become constants of compiled code, which the sizes of tensors must not be.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.quant.cast import Cast

ALL = 0  # as the side of a tile: all there is
Tile = tuple[int, int]


def tile_of(cast: Cast, dim: int, dimensions: int) -> Tile:
    """Returns the tile of a cast whose blocks lie along ``dim`` of a tensor with this number of dimensions."""
    block = cast.scale.block
    if isinstance(block, tuple):
        return block
    if block == "tensor":
        return (ALL, ALL)
    size = ALL if block == "row" else int(block)
    return (size, 1) if dimensions == 2 and dim in (0, -2) else (1, size)


def to_blocks(matrix: Tensor, tile: Tile) -> Tensor:
    """Blocked view of a matrix ``[R, C]``, zero-padded to whole tiles (zeros change no maximum and round to zero)."""
    matrix = matrix.contiguous()
    (rows, columns), (k1, k2) = matrix.shape, tile
    if tile == (ALL, ALL):
        return matrix.reshape(rows * columns, 1)
    if ALL in tile:
        return matrix.reshape(rows, 1, columns)
    if rows % k1 or columns % k2:
        matrix = F.pad(matrix, (0, -columns % k2, 0, -rows % k1))
        rows, columns = matrix.shape
    if k1 == 1:
        return matrix.reshape(rows * columns // k2, k2)
    if k2 == 1:
        return matrix.reshape(rows // k1, k1, columns)
    return matrix.reshape(rows // k1, k1, columns // k2, k2)


def block_dims(blocks: Tensor, tile: Tile) -> tuple[int, ...]:
    if ALL not in tile:
        return tuple(range(1, blocks.dim(), 2))
    return (2,) if tile == (1, ALL) else (0,)


def elements_per_block(matrix: Tensor, blocks: Tensor, tile: Tile, shape: torch.Size) -> Tensor:
    """Number of elements in each block without padding, at least 1: float32. ``shape`` is that of the global matrix."""
    dims = block_dims(blocks, tile)
    if ALL in tile:  # filled on the device: copying a number there would wait for it
        count = math.prod(size for size, side in zip(shape, tile, strict=True) if side == ALL)
        return torch.full((), max(count, 1), device=blocks.device)
    if blocks.numel() == matrix.numel():
        return torch.full((), max(math.prod(blocks.shape[i] for i in dims), 1), device=blocks.device)
    return to_blocks(torch.ones_like(matrix), tile).sum(dims, keepdim=True, dtype=torch.float32)


def scales_view(scales: Tensor, blocks: Tensor, tile: Tile) -> Tensor:
    """Reshapes scales, given in the order of the matrix, so that they broadcast over a blocked view."""
    dims = block_dims(blocks, tile)
    return scales.reshape([1 if i in dims or i % 2 else size for i, size in enumerate(blocks.shape)])


def from_blocks(blocks: Tensor, shape: torch.Size, tile: Tile) -> Tensor:
    """Inverse of :func:`to_blocks`: the matrix of this shape, without padding."""
    rows, columns = shape
    if ALL in tile:
        return blocks.reshape(shape)
    padded = blocks.reshape(rows + -rows % tile[0], columns + -columns % tile[1])
    return padded if padded.shape == shape else padded[:rows, :columns]


def as_matrix(x: Tensor, dim: int) -> Tensor:
    """Returns a tensor as a matrix with the blocked dimension in the columns; a matrix is returned as it is."""
    if x.dim() == 2:
        return x
    return x.movedim(dim, -1).flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def from_matrix(matrix: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Inverse of :func:`as_matrix`, to a tensor of ``shape`` whose size along ``dim`` may have changed."""
    if len(shape) == 2:
        return matrix
    leading = [size for i, size in enumerate(shape) if i != len(shape) + dim]
    return matrix.reshape(*leading, matrix.shape[-1]).movedim(-1, dim)


def element_index(blocks: Tensor, offset: Tensor | None = None, single: tuple[int, ...] = ()) -> Tensor:
    """Row-major int32 index of every element in the matrix, padded to whole blocks. For a shard, ``offset`` is int32
    ``[3]`` or ``[1, 3]``: its columns, those of the global matrix, and the global index of its first element; indices
    are then global. Along the dimensions ``single`` only the first element's, if there is one."""
    index: Tensor | int = 0
    stride = 1
    for dimension in reversed(range(blocks.dim())):
        shape = [1] * blocks.dim()
        size = blocks.shape[dimension]
        shape[dimension] = min(size, 1) if dimension in single else size
        index = index + torch.arange(shape[dimension], dtype=torch.int32, device=blocks.device).view(shape) * stride
        stride = stride * size
    assert isinstance(index, Tensor)
    if offset is None:
        return index
    columns, all_columns, first = offset.unbind(-1)
    return index + torch.div(index, columns, rounding_mode="floor") * (all_columns - columns) + first
