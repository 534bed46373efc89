"""Arguments of the kernels of an optimizer's step: shards of parameters in memory, and the decision about them."""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NOTHING = 3  # the kind of a missing gradient
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


#: The floating numbers of a `Decision`, in the order in which C++ has them.
FLOATING = (
    "limit",  # T of AdaClip, or the factor on v of SpikeClip
    "ratio",  # T/M of AdaClip
    "unit",  # squares are summed in units of its square, so that they fit
    "factor",  # on clipped gradients
    "weight1",  # weights of this step in the moments
    "weight2",
    "rate",  # the learning rate
    "decay",  # the share that a parameter loses first
    "old_scale",  # of master weights, before and after the step
    "new_scale",
)


class Decision(NamedTuple):
    """The decision of a step about the parameters of a batch: all passes read it, in plain torch, C++ and Triton.

    Attributes:
        rule: for elements, ``"ada_clip"``, ``"spike_clip"`` or None.
        numbers: tensors [P] by name, as far as they are decided: the names in ``FLOATING``; ``taken`` (bool), False if
            the parameter skips the step; ``steps`` and ``steps_since_reset`` (int64), counts before this step, on which
            random bits depend. Other names are for the rules alone.
        eps: ε of Adam's denominator.
        decays: False if each ``decay`` is 0.
    """

    rule: str | None
    numbers: Mapping[str, Tensor]
    eps: float = 0.0
    decays: bool = False


def indices_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Returns the numbers as int64 on a device; the host does not wait."""
    if not numbers:
        return torch.empty(0, dtype=torch.int64, device=device)
    result = torch.frombuffer(array("q", numbers), dtype=torch.int64)
    return result.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else result
