"""The passes of a step over all elements, in plain torch: the specification, and what runs where no kernel does.

    measure          max|g| of each shard
    squares          Σ(clip(g)/unit)² of each shard, and how many elements the rule changed
    update           Adam, with factor·clip(g); what `squares` gives, where nothing needed it before
    write_clipped    factor·clip(g), into other tensors

What lies between them, in `guards` and `guarded_adam`, is arithmetic on one number per parameter. Tensors are handled
in pieces, which bounds the memory of temporaries. Nothing here waits for a device: scalars are 0-d tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.distributed import offsets_of
from lightning_lowbit.optim import clipping
from lightning_lowbit.optim.batch import Batch, Step
from lightning_lowbit.optim.moments import Draw, Piece


class ElementClip(NamedTuple):
    """The rule for elements in one step: ``limit``, T of AdaClip or what SpikeClip multiplies v with, and AdaClip's
    ``ratio`` T/M; [P] each."""

    rule: str | None
    limit: Tensor
    ratio: Tensor


class Update(NamedTuple):
    """What Adam does with each parameter, [P] each; `guarded_adam` has the equations.

    ``factor`` is on gradients; ``rate`` the learning rate of this step; ``decay`` the share that a parameter loses
    first. The scales of master weights, before and after the step, are None without these. ``unit`` is that of squares,
    and None where these are not summed.
    """

    factor: Tensor
    weight1: Tensor
    weight2: Tensor
    rate: Tensor
    decay: Tensor
    old_scale: Tensor | None
    new_scale: Tensor | None
    unit: Tensor | None


class Passes:
    """The passes over a batch in plain torch; also the interface of those in kernels."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def load_scalars(self) -> dict[str, Tensor]:
        """The scalars of the members' states, [P] for each name."""
        return {name: torch.stack([m.state[name] for m in self.batch.members]) for name in self.batch.names}

    def store_scalars(self, scalars: Mapping[str, Tensor]) -> None:
        for name, values in scalars.items():
            torch._foreach_copy_([member.state[name] for member in self.batch.members], list(values.unbind()))

    def measure(self) -> Tensor:
        """max|g| of the shards, [P]; −1 without a gradient."""
        return torch.stack([self._none if m.gradient is None else self._amax(m.gradient) for m in self.batch.members])

    def measure_weights(self) -> Tensor:
        """max|p| of the shards, [P]."""
        return torch.stack([self._amax(member.shard) for member in self.batch.members])

    def squares(self, step: Step, elements: ElementClip, unit: Tensor) -> Tensor:
        """Σg² of the shards after the rule for elements, in units², and the number of changed elements: [2, P]."""
        columns = []
        for index, one in enumerate(unit.unbind()):
            there = self._gradient_pieces(index, step, elements.rule)
            columns.append(self._added([self._sums(*self._clip(piece, index, elements, v), one) for piece, v in there]))
        return torch.stack(columns, dim=1)

    def update(self, step: Step, elements: ElementClip, numbers: Update) -> Tensor | None:
        """Adam on parameters, moments and master weights; with a unit, Σg² and counts as of `squares`."""
        columns = []
        for index in range(len(self.batch.members)):
            of_one = Update(*(None if column is None else column[index] for column in numbers))  # type: ignore[arg-type]
            columns.append(self._update_one(index, step, elements, of_one))
        return None if numbers.unit is None else torch.stack(list(map(self._added, columns)), dim=1)

    def write_clipped(
        self, step: Step, elements: ElementClip, factor: Tensor, indices: Sequence[int], targets: Sequence[Tensor]
    ) -> None:
        """Gradients of some members, clipped and multiplied by ``factor`` [P], into tensors of the shards' shapes."""
        for index, target in zip(indices, targets, strict=True):
            written = clipping.pieces(target)
            for piece, v in self._gradient_pieces(index, step, elements.rule):
                next(written)[0].copy_(self._clip(piece, index, elements, v)[0] * factor[index])

    @property
    def _none(self) -> Tensor:
        return self.batch.zero - 1

    def _amax(self, tensor: Tensor) -> Tensor:
        amaxes = [clipping.amax(piece).to(self.batch.dtype) for (piece,) in clipping.pieces(tensor)]
        return torch.stack(amaxes).amax() if len(amaxes) > 1 else (amaxes or [self.batch.zero])[0]

    def _clip(self, piece: Tensor, index: int, elements: ElementClip, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A piece after the rule for elements, and a tensor that is 0 where nothing changed, or None for everywhere.

        ``v`` is SpikeClip's second moment of the same elements.
        """
        wide = piece.to(self.batch.dtype)
        if elements.rule == "spike_clip" and v is not None:
            clipped = clipping.spike_clip(wide, v.to(self.batch.dtype), elements.limit[index])
            return clipped, clipped - wide
        if elements.rule == "ada_clip":
            spikes = clipping.is_spike(wide, elements.limit[index])
            return clipping.ada_clip(wide, spikes, elements.ratio[index]), spikes
        return wide, None

    def _sums(self, clipped: Tensor, changed: Tensor | None, unit: Tensor) -> Tensor:
        """Σ(clipped/unit)² and the number of changed elements of a piece: [2]."""
        count = self.batch.zero if changed is None else torch.count_nonzero(changed).to(self.batch.dtype)
        return torch.stack([clipping.sum_of_squares(clipped / unit), count])

    def _added(self, sums: list[Tensor]) -> Tensor:
        return sums[0] if len(sums) == 1 else torch.stack([self.batch.zero.expand(2), *sums]).sum(0)

    def _pieces_of(self, index: int, step: Step, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Pieces of tensors with the shard's shape, each with the state of its rows."""
        member, draw, row = self.batch.members[index], None, 0
        if member.moments.draws:
            steps, own = step.scalars["steps"][index], member.number << 40  # each parameter has its own random bits
            key, epoch = steps + own, steps - step.scalars["steps_since_reset"][index] + own
            draw = Draw(offsets_of(member.parameter), member.parameter.shape, key, epoch, step.taken[index])
        for piece in clipping.pieces(*tensors, *member.kept.values()):
            kept = dict(zip(member.kept, piece[len(tensors) :], strict=True))
            yield (*piece[: len(tensors)], Piece(kept, draw and draw.at(row)))
            row += len(piece[0])

    def _gradient_pieces(self, index: int, step: Step, rule: str | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Pieces of a gradient, each with SpikeClip's v or None."""
        gradient, moments = self.batch.gradients[index], self.batch.members[index].moments
        if rule != "spike_clip":
            return ((piece, None) for (piece,) in clipping.pieces(gradient))
        return (
            (moments.select(rows, piece), moments.mean_square(piece))
            for rows, piece in self._pieces_of(index, step, gradient)
        )

    def _update_one(self, index: int, step: Step, elements: ElementClip, numbers: Update) -> list[Tensor]:
        """Adam on one parameter; returns the sums of pieces of its gradient, [2] each, none without a unit."""
        sums: list[Tensor] = []
        options, member = self.batch.options, self.batch.members[index]
        moments, decays = member.moments, bool(options["weight_decay"])
        for p, g, piece in self._pieces_of(index, step, member.shard, self.batch.gradients[index]):
            mean, mean_square = moments.load(piece)
            clipped, changed = self._clip(moments.select(g, piece), index, elements, mean_square)
            if numbers.unit is not None:
                sums.append(self._sums(clipped, changed, numbers.unit))
            gradient = clipped * numbers.factor
            if moments.is_sparse and decays:
                p.mul_(1 - numbers.decay)  # all elements, also those that have no moments
            weights, master = moments.select(p, piece), piece.state.get("master")
            if master is not None:
                assert numbers.old_scale is not None and numbers.new_scale is not None
                is_known = numbers.old_scale > 0  # not before the first step
                weights = torch.where(
                    is_known, master.to(self.batch.dtype) * numbers.old_scale, weights.to(self.batch.dtype)
                )
            work = weights.to(self.batch.dtype)
            decay = numbers.decay if decays and not moments.is_sparse else None
            adam_(
                work, gradient, mean, mean_square, numbers.weight1, numbers.weight2, numbers.rate, decay, options["eps"]
            )
            if master is not None:
                work = _round_to_master(master, work, numbers.new_scale, step.taken[index])  # type: ignore[arg-type]
            moments.restore(p, work, piece)
            moments.store(piece, mean, mean_square)
        return sums


def _round_to_master(master: Tensor, work: Tensor, scale: Tensor, taken: Tensor) -> Tensor:
    """Rounds weights to fp16 masters, and returns what these decode to; a skipped step changes neither."""
    largest = torch.finfo(torch.float16).max
    scaled = (work / scale).clamp_(-largest, largest).to(torch.float16)
    master.copy_(torch.where(taken, scaled, master))
    return torch.where(taken, scaled.to(work.dtype) * scale, work)


# fmt: off
def adam_(
    parameter: Tensor, gradient: Tensor, mean: Tensor, mean_square: Tensor,    # any one shape, dtype of the statistics
    weight1: Tensor, weight2: Tensor, rate: Tensor, decay: Tensor | None,      # 0-d
    eps: float,
) -> None:  # fmt: on
    """Applies a piece of a gradient in place, and overwrites it. Weights, rate and decay of 0 change nothing else."""
    gradient.nan_to_num_(0.0, 0.0, 0.0)  # of a skipped step: 0·NaN is NaN
    mean.lerp_(gradient, weight1)
    mean_square.lerp_(gradient.square_(), weight2)
    direction = torch.div(mean, torch.sqrt(mean_square, out=gradient).add_(eps), out=gradient)
    if decay is not None:
        parameter.mul_(1 - decay)
    parameter.sub_(direction.mul_(rate))
