"""The amaxes that a layer keeps between steps."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.nn.plan import OPERANDS


class LayerAmaxes(NamedTuple):
    """A layer's views of the state of :class:`lightning_lowbit.nn.AmaxHistories`: float32, 0 where there is no amax.

    ``in_force`` and ``staged``, ``[6]``, are for delayed scaling; ``channels`` and ``staged_channels``,
    ``[in_features]``, for smoothed channels (else empty). The staged ones are of the current step. All layers share
    ``switch``, a list of one bool: whether passes stage their amaxes.
    """

    in_force: Tensor
    staged: Tensor
    channels: Tensor
    staged_channels: Tensor
    switch: list[bool]


def stage_(staged: Tensor, amax: Tensor) -> None:
    """Raises the amax of the current step, in place; an amax that is not finite is dropped."""
    staged.copy_(torch.maximum(staged, amax.nan_to_num(nan=0.0, posinf=0.0)))


def amax_in_force(in_force: Tensor, operand: str, own: Tensor) -> Tensor:
    """The amax that delayed scaling uses for an operand: the one in force, or the operand's own while there is none."""
    remembered = in_force[OPERANDS.index(operand)]
    return torch.where(remembered > 0, remembered, own)
