"""Parameters in batches, which the stages of a step work on."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbit.optim import clipping
from lightning_lowbit.optim.moments import DenseMoments

if TYPE_CHECKING:
    from lightning_lowbit.optim.passes import Passes

#: Scalars of the rules in the state of a parameter, 0-d each: t, T, and AdaGN's m, the total weight in it, and v.
SCALARS = ("steps", "threshold", "norm_mean", "norm_mean_weight", "norm_mean_square")


def scalar_dtype(name: str, statistics: torch.dtype) -> torch.dtype:
    """The dtype of a scalar of the state, where statistics have another."""
    return torch.int64 if name.startswith("steps") else statistics


class GradientStatistics(NamedTuple):
    """What the last step measured on one parameter's whole gradient; 0-d tensors on its device.

    Attributes:
        maximum: max|g| before any rule; Inf if it made the step skip, −1 if no rank has a gradient.
        threshold: T of AdaClip, which includes this maximum; 0 without that rule.
        clipped: number of elements changed by AdaClip or SpikeClip.
        norm, norm_after: ‖g‖₂ before and after AdaGN or GradClip, of clipped elements; NaN without any rule.
        steps_since_reset: number of gradients in the moments, including this one.
    """

    maximum: Tensor
    threshold: Tensor
    clipped: Tensor
    norm: Tensor
    norm_after: Tensor
    steps_since_reset: Tensor


class Member(NamedTuple):
    """A parameter in a step; ``number`` is its place in the optimizer.

    ``gradient`` is None where only other ranks have one. The step reads and writes the scalars in ``state``. ``kept``
    are the tensors of ``moments``, with a row for each row of the shard.
    """

    parameter: Tensor
    number: int
    shard: Tensor
    gradient: Tensor | None
    state: dict[str, Tensor]
    moments: DenseMoments
    kept: Mapping[str, Tensor]


class Batch:
    """P parameters with the same options, device, dtype of the statistics and process groups of their shards.

    ``passes`` work on their elements; they are chosen when all members are there.
    """

    passes: "Passes"

    def __init__(
        self,
        options: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        groups: tuple[dist.ProcessGroup, ...],
        names: Sequence[str],
    ) -> None:
        self.options, self.device, self.dtype, self.groups, self.names = options, device, dtype, groups, names
        self.clips_elements = options["element_clip"] is not None
        # Norms and numbers of clipped elements: measured before the update if a rule needs norms, else by it.
        self.sums_in_update = self.clips_elements and options["norm_clip"] is None and options["sums_in_update"]
        self.measures_norms = not self.sums_in_update and (self.clips_elements or options["norm_clip"] is not None)
        self.zero = torch.zeros((), dtype=dtype, device=device)
        self.members: list[Member] = []
        self.gradients: list[Tensor] = []  # zeros where this rank has none

    def add(self, member: Member) -> None:
        gradient, shard = member.gradient, member.shard
        self.gradients.append(shard.new_zeros(()).expand(shard.shape) if gradient is None else gradient)
        self.members.append(member)


class Step(NamedTuple):
    """Which parameters take a step (``taken``, bool [P]; ``weight``, the same in the dtype of the statistics).

    ``scalars`` are those of the state, [P] each. Averages include this step; counts follow at its end.
    """

    taken: Tensor
    weight: Tensor
    scalars: dict[str, Tensor]

    def steps_since_reset(self) -> Tensor:
        """Number of gradients in the moments, [P]."""
        return self.scalars.get("steps_since_reset", self.scalars["steps"])

    def averaging(self, decay: float, steps_before: Tensor) -> Tensor:
        """Weight of this step in an average, [P]; 0 where it is skipped."""
        return self.weight * clipping.averaging_weight(decay, steps_before, self.weight.dtype)


def remember(batch: Batch, step: Step) -> None:
    """Counts the step, and writes the scalars back."""
    step.scalars["steps"] += step.taken
    batch.passes.store_scalars(step.scalars)
