"""The passes of a step over all elements, in plain torch: the specification, and the code where no kernel serves.

    measure          max|g| of each shard
    squares          Σ(clip(g)/unit)² of each shard, and how many elements the rule changed
    update           Adam, with factor·clip(g); the sums of `squares`, where nothing needed them before
    write_clipped    factor·clip(g), into other tensors

Between them the rules do arithmetic on one number per parameter. Tensors are handled in pieces, which bounds the memory
of temporaries. Nothing here waits for a device: scalars are 0-d tensors.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbit._torch import foreach_copy_
from lightning_lowbit.distributed import offsets_of
from lightning_lowbit.kernels.shards import FLOATING, Decision
from lightning_lowbit.optim.moments import DenseMoments, Draw, Piece
from lightning_lowbit.optim.rules import ELEMENT_RULES, GroupRules, Numbers

#: Scalars of the rules in the state of a parameter, 0-d each: t, T, and AdaGN's m, the total weight in it, and v.
SCALARS = ("steps", "threshold", "norm_mean", "norm_mean_weight", "norm_mean_square")

# Elements handled at a time. CPU: parameter, gradient, two moments and a scratch tensor in fp32 stay within 5 MB of
# second-level cache (of 2^15 … 2^20, smaller ones cost calls, larger ones gain little). Elsewhere: few launches, about
# 1 GB of scratch.
_ON_CPU, _ON_ACCELERATOR = 2**18, 2**26
_elements: int | None = None  # of `in_pieces`


def scalar_dtype(name: str, statistics: torch.dtype) -> torch.dtype:
    """Returns the dtype of a state's scalar, given that of the statistics."""
    return torch.int64 if name.startswith("steps") else statistics


class Member(NamedTuple):
    """A parameter in a step.

    Attributes:
        parameter: the whole parameter, which may be a DTensor.
        number: its place in the optimizer.
        shard: this rank's part of it.
        gradient: of the shard; None where only other ranks have one.
        state: holds the scalars, which the step reads and writes.
        moments: the format of the moments.
        tensors: the moments and master weights, with a row for each row of the shard.
    """

    parameter: Tensor
    number: int
    shard: Tensor
    gradient: Tensor | None
    state: dict[str, Tensor]
    moments: DenseMoments
    tensors: Mapping[str, Tensor]


class Batch:
    """P parameters in one step: with the same options, device, dtype of the statistics and process groups.

    The stages of the step add to ``numbers``: the scalars of the states; ``amax``, max|g| of whole gradients (Inf where
    the step must be skipped, −1 without a gradient); ``weight``, 1 for a parameter that takes the step and 0 otherwise;
    ``norm``, ``norm_after`` and ``changed`` as in `GradientStatistics`; and the numbers of a `Decision`.

    Attributes:
        group: the options of the parameter group.
        rules: of these parameters.
        passes: work on their elements; chosen when all members are known.
        finite: bool, 0-d; False if a gradient of any batch or rank is not finite: no parameter takes the step.
        sums: Σ(clip(g)/unit)² and numbers of changed elements of the shards on this rank, [2, P]; None without a rule.
        memory: of the optimizer: what passes need not find out again in the next step, by the first member's number.
    """

    passes: "Passes"
    finite: Tensor
    sums: Tensor | None = None

    def __init__(
        self,
        group: Mapping[str, Any],
        rules: GroupRules,
        device: torch.device,
        dtype: torch.dtype,
        groups: tuple[dist.ProcessGroup, ...],
        scalars: Sequence[str],
    ) -> None:
        self.group, self.rules, self.device, self.dtype = group, rules, device, dtype
        self.groups, self.scalars = groups, scalars
        is_clipped, is_normed = rules.elements.name is not None, rules.norms.name is not None
        # Norms and numbers of clipped elements: measured before the update if a rule needs norms, else by it.
        self.sums_in_update = is_clipped and not is_normed and rules.sums_in_update
        self.measures_norms = not self.sums_in_update and (is_clipped or is_normed)
        self.zero = torch.zeros((), dtype=dtype, device=device)
        self.memory: dict[int, Any] = {}
        self.members: list[Member] = []
        self.gradients: list[Tensor] = []  # zeros where this rank has none
        self.numbers: Numbers = {}

    def add(self, member: Member) -> None:
        gradient, shard = member.gradient, member.shard
        self.gradients.append(shard.new_zeros(()).expand(shard.shape) if gradient is None else gradient)
        self.members.append(member)

    def decision(self, eps: float = 0.0, decays: bool = False) -> Decision:
        return Decision(self.rules.elements.name, self.numbers, eps, decays)

    def store_scalars(self) -> None:
        """Counts the step, and writes the scalars back."""
        self.numbers["steps"] += self.numbers["taken"]
        self.passes.store_scalars({name: self.numbers[name] for name in self.scalars})


class Passes:
    """The passes over a batch in plain torch; also the interface of the passes in kernels."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def load_scalars(self) -> Numbers:
        """Loads the scalars of the states, each as [P], by one operation for all of a dtype."""
        numbers: Numbers = {}
        for names in self._alike(self.batch.members[0].state):
            rows = torch.stack([member.state[name] for name in names for member in self.batch.members])
            numbers |= zip(names, rows.view(len(names), -1), strict=True)
        return numbers

    def store_scalars(self, scalars: Mapping[str, Tensor]) -> None:
        for names in self._alike(scalars):
            targets = [member.state[name] for name in names for member in self.batch.members]
            foreach_copy_(targets, [value for name in names for value in scalars[name].unbind()])

    def _alike(self, scalars: Mapping[str, Tensor]) -> Iterable[list[str]]:
        """Returns the names of scalars in groups of one dtype."""
        groups: dict[torch.dtype, list[str]] = {}
        for name in self.batch.scalars:
            groups.setdefault(scalars[name].dtype, []).append(name)
        return groups.values()

    def measure(self, weights: bool = False) -> Tensor:
        """Measures max|g| of the shards, −1 without a gradient; or max|p|; [P]."""
        none, tensors = self.batch.zero - 1, [m.shard if weights else m.gradient for m in self.batch.members]
        return torch.stack([none if tensor is None else self._amax(tensor) for tensor in tensors])

    def squares(self, decision: Decision) -> Tensor:
        """Sums g² of the shards after the rule for elements, in units², and counts the changed elements: [2, P]."""
        columns = []
        for index, numbers in enumerate(rows_of(decision)):
            pieces = self._gradient_pieces(index, decision)
            columns.append(self._total([self._sums(*_clip(decision, numbers, *pair), numbers) for pair in pieces]))
        return torch.stack(columns, dim=1)

    def update(self, decision: Decision, sums: bool, done: Collection[int] = ()) -> Tensor | None:
        """Takes Adam's step on parameters, moments and masters; with ``sums``, returns the result of `squares`.

        Members whose numbers are in ``done`` are left alone, and their sums are 0.
        """
        columns = [
            [] if index in done else self._update_one(index, decision, numbers, sums)
            for index, numbers in enumerate(rows_of(decision))
        ]
        return torch.stack(list(map(self._total, columns)), dim=1) if sums else None

    def write_clipped(self, decision: Decision, targets: Sequence[Tensor | None]) -> None:
        """Writes factor·clip(g) into tensors of the shards' shapes, None for members without a gradient."""
        for index, (numbers, target) in enumerate(zip(rows_of(decision), targets, strict=True)):
            results = iter(()) if target is None else pieces_of(target)
            for (result,), pair in zip(results, self._gradient_pieces(index, decision), strict=False):
                result.copy_(_clip(decision, numbers, *pair)[0] * numbers["factor"])

    def _amax(self, tensor: Tensor) -> Tensor:
        # One pass; the infinity norm takes several times as long on a CPU.
        bounds = [torch.aminmax(piece) for (piece,) in pieces_of(tensor)]
        amaxes = [torch.maximum(-low, high).to(self.batch.dtype) for low, high in bounds]
        return torch.stack(amaxes).amax() if len(amaxes) > 1 else (amaxes or [self.batch.zero])[0]

    def _sums(self, clipped: Tensor, changed: Tensor | None, numbers: Numbers) -> Tensor:
        """Returns Σ(clipped/unit)² and the number of changed elements of a piece: [2]."""
        count = self.batch.zero if changed is None else torch.count_nonzero(changed).to(self.batch.dtype)
        flat = (clipped / numbers["unit"]).flatten()
        return torch.stack([torch.dot(flat, flat), count])  # on a CPU more than twice as fast as a norm

    def _total(self, sums: list[Tensor]) -> Tensor:
        return sums[0] if len(sums) == 1 else torch.stack([self.batch.zero.expand(2), *sums]).sum(0)

    def pieces(self, index: int, decision: Decision, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Pieces of tensors with the shard's shape, each with the state of its rows."""
        member, draw, row, numbers = self.batch.members[index], None, 0, decision.numbers
        if member.moments.draws:
            steps, offset = numbers["steps"][index], member.number << 40  # each parameter has its own random bits
            key, epoch = steps + offset, steps - numbers["steps_since_reset"][index] + offset
            draw = Draw(offsets_of(member.parameter), member.parameter.shape, key, epoch, numbers["taken"][index])
        for piece in pieces_of(*tensors, *member.tensors.values()):
            state = dict(zip(member.tensors, piece[len(tensors) :], strict=True))
            yield (*piece[: len(tensors)], Piece(state, draw and draw.at(row)))
            row += len(piece[0])

    def _gradient_pieces(self, index: int, decision: Decision) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Pieces of a gradient in the dtype of the statistics, each with SpikeClip's v or None."""
        gradient, moments = self.batch.gradients[index], self.batch.members[index].moments
        if not ELEMENT_RULES[decision.rule].needs_mean_square:
            return ((piece.to(self.batch.dtype), None) for (piece,) in pieces_of(gradient))
        return (
            (moments.select(rows, piece).to(self.batch.dtype), moments.mean_square(piece))
            for rows, piece in self.pieces(index, decision, gradient)
        )

    def _update_one(self, index: int, decision: Decision, numbers: Numbers, sums: bool) -> list[Tensor]:
        """Adam on one parameter; returns the sums of pieces of its gradient, [2] each, none without ``sums``."""
        result: list[Tensor] = []
        member, dtype = self.batch.members[index], self.batch.dtype
        moments = member.moments
        for p, g, piece in self.pieces(index, decision, member.shard, self.batch.gradients[index]):
            mean, mean_square = moments.load(piece)
            clipped, changed = _clip(decision, numbers, moments.select(g, piece).to(dtype), mean_square)
            if sums:
                result.append(self._sums(clipped, changed, numbers))
            if decision.decays and moments.is_sparse:
                p.mul_(1 - numbers["decay"])  # all elements, also without moments
            weights, master = moments.select(p, piece), piece.state.get("master")
            if master is not None:
                is_known = numbers["old_scale"] > 0  # not before the first step
                weights = torch.where(is_known, master.to(dtype) * numbers["old_scale"], weights.to(dtype))
            work = weights.to(dtype)
            if decision.decays and not moments.is_sparse:
                work.mul_(1 - numbers["decay"])
            # In place, in the memory of the gradient. Of a skipped step 0·NaN would be NaN.
            gradient = (clipped * numbers["factor"]).nan_to_num_(0.0, 0.0, 0.0)
            mean.lerp_(gradient, numbers["weight1"])
            mean_square.lerp_(gradient.square_(), numbers["weight2"])
            direction = torch.div(mean, torch.sqrt(mean_square, out=gradient).add_(decision.eps), out=gradient)
            work.sub_(direction.mul_(numbers["rate"]))
            if master is not None:
                work = _round_to_master(master, work, numbers)
            moments.restore(p, work, piece)
            moments.store(piece, mean, mean_square)
        return result


def rows_of(decision: Decision) -> Iterator[Numbers]:
    """Yields the numbers of one parameter after another, 0-d by name."""
    numbers = decision.numbers
    columns = {name: numbers[name].unbind() for name in ("taken", *FLOATING) if name in numbers}
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def _clip(
    decision: Decision, numbers: Numbers, gradient: Tensor, mean_square: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    return ELEMENT_RULES[decision.rule].clip(gradient, numbers["limit"], numbers["ratio"], mean_square)


def _round_to_master(master: Tensor, work: Tensor, numbers: Numbers) -> Tensor:
    """Rounds weights to fp16 masters, and returns their values; a skipped step changes neither."""
    largest, taken, scale = torch.finfo(torch.float16).max, numbers["taken"], numbers["new_scale"]
    scaled = (work / scale).clamp_(-largest, largest).to(torch.float16)
    master.copy_(torch.where(taken, scaled, master))
    return torch.where(taken, scaled.to(work.dtype) * scale, work)


# --- tensors in pieces ---


@contextmanager
def in_pieces(elements: int) -> Iterator[None]:
    """Handles at most so many elements at a time within this context: fewer take less memory, and more time."""
    global _elements
    previous, _elements = _elements, elements
    try:
        yield
    finally:
        _elements = previous


def elements_at_once(device: torch.device, on_cpu: int = _ON_CPU) -> int:
    """Returns how many elements are handled at a time, ``on_cpu`` of them on a CPU."""
    return _elements or (on_cpu if device.type == "cpu" else _ON_ACCELERATOR)


def pieces_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of one length along the first dimension; the first tensor decides the rows of a piece."""
    if tensors[0].numel() == 0:
        return
    tensors = tuple(tensor if tensor.dim() else tensor.unsqueeze(0) for tensor in tensors)
    elements = elements_at_once(tensors[0].device)
    if tensors[0].numel() <= elements or torch.compiler.is_compiling():
        yield tensors
        return
    rows = max(1, elements * len(tensors[0]) // tensors[0].numel())
    yield from zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
