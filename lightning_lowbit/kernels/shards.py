"""What the kernels of an optimizer's step know of a parameter: addresses and sizes of a shard."""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NOTHING = 3  # the kind of a gradient that is not there
DENSE, FP8, SPARSE = range(3)


class ParameterShard(NamedTuple):
    """The fields of ``struct Shard`` in C++, which says what they mean; an address of 0 stands for nothing."""

    weights: int
    gradient: int
    mean: int
    mean_square: int
    mean_scale: int
    mean_square_scale: int
    master: int
    weights_kind: int
    gradient_kind: int
    moments: int
    size: int
    row: int
    columns: int
    every: int
    first: int
    stride: int
    number: int


class Rules(NamedTuple):
    """What the rules decided: ``rule`` for elements, and ``numbers`` [P] by name, one for each shard.

    These are ``taken`` (bool), ``steps`` and ``since_reset`` (int64), and floating ones: ``limit``, ``ratio``,
    ``unit``, ``factor``, ``weight1``, ``weight2``, ``rate``, ``decay``, ``old_scale`` and ``new_scale``, as far as a
    pass reads them. ``decays`` says whether some decay is not 0.
    """

    rule: str | None
    numbers: Mapping[str, Tensor]
    eps: float = 0.0
    decays: bool = False


def moved(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on a device, for which the host does not wait."""
    if not numbers:
        return torch.empty(0, dtype=torch.int64, device=device)
    made = torch.frombuffer(array("q", numbers), dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
