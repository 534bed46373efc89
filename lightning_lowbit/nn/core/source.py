"""What an operand of a GEMM is made from."""

from typing import Any, NamedTuple

from torch import Tensor

from lightning_lowbit.kernels import rotate
from lightning_lowbit.nn.casts.plan import CONTRACTION
from lightning_lowbit.quant.shard import Shard


class Source(NamedTuple):
    """The source of an operand, ``values * factor``; ``values`` is None for a tensor that is not needed. With
    ``rotation``, signs of a Hadamard transform, it is the rotated tensor, which the kernel of a cast makes."""

    values: Any
    amax: Tensor | None = None
    factor: Tensor | None = None
    is_operand: bool = False
    rotation: Tensor | None = None

    def rotated(self, name: str, signs: Tensor, shard: Shard | None) -> "Source":
        """With rotated groups along the contraction axis of an operand; one process must hold a whole group."""
        if self.is_operand:  # it was rotated before
            return self
        if shard is not None and shard.dim == CONTRACTION[name]:
            shard.check(self.values.shape, len(signs), "groups of a Hadamard transform, of")
        return Source(self.values, rotation=signs)

    def turned(self, name: str) -> "Source":
        """The same as a rotated tensor, where more than a kernel of a cast reads it."""
        return self if self.rotation is None else Source(rotate(self.values, self.rotation, CONTRACTION[name]))
