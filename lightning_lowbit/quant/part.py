"""A matrix of which each process of a group holds one part, cut along rows or columns.

Quantized by itself, a part would get scales and random bits of its own. These are those of the whole instead, so that
all parts together are, to the bit, what the whole would be:

    the amax of the tensor, and statistics of rows and columns that are cut     reduced over the group
    blocks                                                                      parts must end where blocks end
    the index of an element, of which random bits are made                      that in the whole
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbit.compilation import opaque
from lightning_lowbit.quant.blocks import ALL, Tile
from lightning_lowbit.quant.rounding import int32
from lightning_lowbit.quant.scaling import absmax


def ends_within(step: int, size: int, side: int) -> bool:
    """Whether ``size`` rows or columns, cut after each ``step``, are cut within a unit of ``side`` of them."""
    return step < size and step % side != 0


class Part(NamedTuple):
    """Which part of a matrix this process holds.

    Attributes:
        group: the name of the process group that holds all of it.
        dim: 0 or 1, along which it is cut.
        start: where the part begins along it.
        step: how much of it each process holds, the last ones perhaps less.
        size: of the whole along it.
    """

    group: str
    dim: int
    start: int
    step: int
    size: int

    @property
    def spec(self) -> str:
        """The same as text, which operators of a compiled graph can take."""
        return f"{self.dim}:{self.start}:{self.step}:{self.size}:{self.group}"

    @staticmethod
    @cache
    def from_spec(spec: str | None) -> "Part | None":
        """Inverse of :attr:`spec`; None of None."""
        if spec is None:
            return None
        *numbers, group = spec.split(":", 4)
        return Part(group, *map(int, numbers))

    def whole(self, shape: torch.Size) -> torch.Size:
        """The shape of the whole, from that of the part."""
        return torch.Size(self.size if dim == self.dim else n for dim, n in enumerate(shape))

    def padded(self, multiple: int) -> "Part":
        """The same of a whole that is padded to a multiple of some size."""
        return self._replace(size=self.size + -self.size % multiple)

    def check(self, shape: torch.Size, side: int, what: str) -> None:
        """Raises, on all processes, if parts do not end where units of ``side`` elements along ``dim`` do.

        Raises:
            ValueError: so.
        """
        if ends_within(self.step, self.size, side):
            raise ValueError(
                f"A matrix of {tuple(self.whole(shape))} is cut after each {self.step} of dimension {self.dim}, in the "
                f"middle of {what} {side}: no process has all that shares a scale. Choose sizes of which each gets a "
                f"multiple of {side}, or smaller {what.split()[0]}."
            )

    def place(self, shape: torch.Size, tile: Tile, device: torch.device) -> Tensor:
        """What :func:`lightning_lowbit.quant.blocks.element_index` takes, for a part of this shape in tiles."""
        rows, columns = (n if k == ALL else n + -n % k for n, k in zip(shape, tile, strict=True))
        along = self.whole(torch.Size((rows, columns)))
        all_columns = along[1] if ALL in tile else along[1] + -along[1] % tile[1]
        first = self.start * all_columns if self.dim == 0 else self.start
        numbers = [max(columns, 1), all_columns, first]
        return torch.stack([torch.full((), int32(n), dtype=torch.int32, device=device) for n in numbers])

    def cuts(self, tile: Tile) -> bool:
        """Whether what shares a scale lies on several processes: blocks are never cut, see :meth:`check`."""
        return tile[self.dim] == ALL

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduces over the group; NaN counts as infinite in maxima, and as minus infinite in minima."""
        from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

        if op != dist.ReduceOp.SUM:
            infinite = torch.inf if op == dist.ReduceOp.MAX else -torch.inf
            values = values.nan_to_num(nan=infinite, posinf=torch.inf, neginf=-torch.inf)
        values = values.clone()  # contiguous, and no part of what it was made of
        dist.all_reduce(values, op, _resolve_process_group(self.group))  # type: ignore[arg-type]
        return values


def absmax_of(x: Tensor, part: Part | None) -> Tensor:
    """Largest magnitude of a tensor, or of the whole that it is a part of: 0-d float32."""
    return absmax(x) if part is None else _absmax_of_whole(x, part.spec)


def largest_of(amaxes: Tensor, part: Part | None) -> Tensor:
    """The largest over all processes that hold parts, of what each knows of its own: float32, any shape."""
    return amaxes if part is None else _largest_of_whole(amaxes, part.spec)


@opaque(lambda amaxes, part: torch.empty_like(amaxes))
def _largest_of_whole(amaxes: Tensor, part: str) -> Tensor:
    known = Part.from_spec(part)
    assert known is not None
    return known.reduce(amaxes, dist.ReduceOp.MAX)


@opaque(lambda x, part: x.new_empty((), dtype=torch.float32))
def _absmax_of_whole(x: Tensor, part: str) -> Tensor:
    known = Part.from_spec(part)
    assert known is not None
    return known.reduce(absmax(x), dist.ReduceOp.MAX)
