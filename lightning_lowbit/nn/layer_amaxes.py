"""The amaxes that a layer holds between steps, and what an operand is scaled by."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.nn.casts import OPERANDS


class LayerAmaxes(NamedTuple):
    """A layer's views of the state of :class:`lightning_lowbit.nn.AmaxHistories`; all float32, 0 where there is none.

    Attributes:
        in_force: ``[6]``, what operands with delayed scaling are scaled by.
        staged: ``[6]``, the largest amaxes of the current step.
        channels: ``[in_features]``, amaxes of the channels of x in the last step, where they are smoothed; else empty.
        staged_channels: likewise, of the current step.
        switch: a list of one, shared by all layers: whether passes belong to a step and are staged.
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
    """What delayed scaling scales an operand by: the amax in force, or its own while there is none.

    Args:
        in_force: ``[6]``, of :class:`LayerAmaxes`.
        operand: its name, one of ``OPERANDS``.
        own: float32, 0-d, the operand's own amax.
    """
    remembered = in_force[OPERANDS.index(operand)]
    return torch.where(remembered > 0, remembered, own)
