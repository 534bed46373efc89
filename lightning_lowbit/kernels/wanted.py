"""What a kernel is asked for."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.shard import Shard


class Wanted(NamedTuple):
    """An operand to be made from a matrix, in the words of :func:`lightning_lowbit.quant.quantize_operand`."""

    cast: Cast
    dim: int
    key: Tensor | None
    dtype: torch.dtype
    shard: Shard | None = None
