"""A matrix of which each process of a group holds one shard, cut along rows or columns.

A shard is quantized with the scales and random bits of the global matrix, so that all shards together equal the
quantized global matrix to the bit. Amaxes, and statistics of rows or columns that are cut, are reduced over the group.
Shards must end where blocks end. Random bits are made from an element's index in the global matrix.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbit._torch.sharding import process_group
from lightning_lowbit.compilation import opaque
from lightning_lowbit.quant.blocks import ALL, Tile
from lightning_lowbit.quant.rounding import int32


def ends_within(step: int, size: int, side: int) -> bool:
    """Returns whether cutting ``size`` rows or columns after each ``step`` splits a unit of ``side`` of them."""
    return step < size and step % side != 0


class Shard(NamedTuple):
    """The shard of a matrix that this process holds.

    ``dim`` (0 or 1) is cut into pieces of ``step`` rows or columns; the last ones may be smaller. The global matrix has
    ``size`` of them, and this shard begins at ``start``. ``group`` names the process group that holds all shards.
    """

    group: str
    dim: int
    start: int
    step: int
    size: int

    @property
    def spec(self) -> str:
        """The shard as text, for operators of a compiled graph."""
        return f"{self.dim}:{self.start}:{self.step}:{self.size}:{self.group}"

    @staticmethod
    @cache
    def from_spec(spec: str) -> "Shard":
        """Inverse of :attr:`spec`."""
        *numbers, group = spec.split(":", 4)
        return Shard(group, *map(int, numbers))

    def global_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size(self.size if dim == self.dim else n for dim, n in enumerate(shape))

    def padded(self, multiple: int) -> "Shard":
        """This shard, if the global matrix were padded to a multiple of ``multiple``."""
        return self._replace(size=self.size + -self.size % multiple)

    def splits(self, side: int) -> bool:
        """Returns whether a shard boundary splits a unit of ``side`` elements along ``dim``."""
        return ends_within(self.step, self.size, side)

    def check(self, shape: torch.Size, side: int, units: str) -> None:
        """Raises a ValueError, on all processes, if a shard boundary splits ``side`` elements along ``dim``."""
        if self.splits(side):
            raise ValueError(
                f"A matrix of {tuple(self.global_shape(shape))} is cut after each {self.step} of dimension {self.dim}, "
                f"in the middle of {units} {side}: no process has all that shares a scale. Choose sizes of which each "
                f"gets a multiple of {side}, or smaller {units.split()[0]}."
            )

    def offset(self, shape: torch.Size, tile: Tile, device: torch.device) -> Tensor:
        """:meth:`place` as int32 ``[3]``, for :func:`lightning_lowbit.quant.blocks.element_index`."""
        numbers = self.place(shape, tile)
        return torch.stack([torch.full((), n, dtype=torch.int32, device=device) for n in numbers])

    def place(self, shape: torch.Size, tile: Tile) -> tuple[int, int, int]:
        """Returns the place of a shard of this shape: its columns and the global matrix's, both padded to whole tiles,
        and the global index of its first element; each wrapped as int32 does."""
        rows, columns = (n if k == ALL else n + -n % k for n, k in zip(shape, tile, strict=True))
        all_columns = self.global_shape(torch.Size((rows, columns)))[1]
        all_columns += 0 if ALL in tile else -all_columns % tile[1]
        first = self.start * all_columns if self.dim == 0 else self.start
        return int32(max(columns, 1)), int32(all_columns), int32(first)

    def cuts(self, tile: Tile) -> bool:
        """Returns whether several processes hold the elements of one scale, of a row, column or tensor."""
        return tile[self.dim] == ALL

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduces over the group; NaN counts as infinity in maxima, and as minus infinity in minima."""
        if op != dist.ReduceOp.SUM:
            infinite = torch.inf if op == dist.ReduceOp.MAX else -torch.inf
            values = values.nan_to_num(nan=infinite, posinf=torch.inf, neginf=-torch.inf)
        values = values.clone()  # contiguous, and sharing no memory with the argument
        dist.all_reduce(values, op, process_group(self.group))
        return values


def amax_of(x: Tensor, shard: Shard | None = None) -> Tensor:
    """Returns max|x| of a tensor, or of a shard's global matrix: 0-d float32, 0 if empty, not finite if x is not."""
    if shard is not None:
        return _global_amax(x, shard.spec)
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x)  # one pass, no temporary, unlike x.abs().amax()
    return torch.maximum(-low, high).float()


def max_over_shards(amax: Tensor, shard: Shard | None) -> Tensor:
    """Element-wise maximum over the processes that hold shards: float32, any shape."""
    return amax if shard is None else _max_over_shards(amax, shard.spec)


@opaque(lambda x, shard: x.new_empty((), dtype=torch.float32))
def _global_amax(x: Tensor, shard: str) -> Tensor:
    return Shard.from_spec(shard).reduce(amax_of(x), dist.ReduceOp.MAX)


@opaque(lambda amax, shard: torch.empty_like(amax))
def _max_over_shards(amax: Tensor, shard: str) -> Tensor:
    return Shard.from_spec(shard).reduce(amax, dist.ReduceOp.MAX)
