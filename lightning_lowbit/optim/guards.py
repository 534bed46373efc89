"""The first two stages of a step: measure gradients, then clip them by the rules of their group.

    measure     max|g| of each parameter                              one MAX over the ranks that hold shards of it
    clip        elements: AdaClip or SpikeClip
                Σg² after that, and how many elements changed         one SUM, only if a rule needs norms
                norms: AdaGN or GradClip

All numbers are of whole tensors, and known before any element changes. A step is skipped if max|g| is NaN or Inf, or if
an element's square does not fit (9e18 in fp32), unless a rule for norms scales it down: every weight of an average and
every count is then multiplied by 0, on the device. A parameter without a gradient on any rank has max|g| = −1, and does
not take the step. The host reads results only of a CPU, where it need not wait.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbit.distributed import all_reduce_
from lightning_lowbit.optim import clipping
from lightning_lowbit.optim.batch import Batch, Step, gradient_pieces
from lightning_lowbit.optim.clipping import Scalar

# Devices whose results the host has at once.
HOST_DEVICES = {"cpu"}

# Squares of gradients within these need no unit to fit fp32; neither does the sum of 2^40 of them.
_SMALL, _LARGE = 1e-12, 1e12

# SpikeClip waits until so many gradients are in the second moment.
SPIKE_CLIP_AFTER = 20


def is_host(device: torch.device) -> bool:
    return device.type in HOST_DEVICES and not torch.compiler.is_compiling()


class Measured(NamedTuple):
    """What the first pass finds.

    ``amax`` is max|g| of whole gradients, [P]: Inf where the step must be skipped, −1 without a gradient.
    ``weight_amax`` is max|p| of whole parameters, [P], where master weights need a scale. ``finite`` is 0-d: whether
    all gradients of all parameters are finite. The rest is max|g| and, where needed, Σg² of each piece of each shard.
    """

    amax: Tensor
    weight_amax: Tensor | None
    finite: Tensor
    piece_amaxes: list[Tensor]
    piece_squares: list[list[Tensor | None]]


class ElementClip(NamedTuple):
    """The rule for elements in one step; its sequences have one entry per parameter."""

    rule: str | None
    dtype: torch.dtype
    limits: Sequence[Scalar] = ()  # T of AdaClip, what SpikeClip multiplies v with
    ratios: Sequence[Scalar] = ()  # T/M of AdaClip
    touched: Sequence[Sequence[bool]] | None = None  # AdaClip on the host: which pieces have elements above T

    def may_change(self, index: int, number: int) -> bool:
        return self.rule is not None if self.touched is None else self.touched[index][number]

    def __call__(self, piece: Tensor, index: int, number: int, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Clips piece ``number`` of parameter ``index``; ``v`` is SpikeClip's second moment of the same elements.

        Returns a new tensor, and one that is 0 where nothing changed; or the piece, and None.
        """
        wide = piece.to(self.dtype)
        if self.rule == "spike_clip" and v is not None:
            clipped = clipping.spike_clip(wide, v.to(self.dtype), self.limits[index])
            return clipped, clipped - wide
        if self.rule == "ada_clip" and self.may_change(index, number):
            above = clipping.spikes(wide, self.limits[index])
            return clipping.ada_clip(wide, above, self.ratios[index]), above
        return wide, None

    def scaled(self, piece: Tensor, index: int, number: int, v: Tensor | None, factor: Scalar) -> Tensor:
        """A piece, clipped and multiplied by ``factor``, in a new tensor."""
        clipped, changed = self(piece, index, number, v)
        return clipped * factor if changed is None else clipped.mul_(factor)


class Clipped(NamedTuple):
    """The result of the rules: g ← factor · elements(g), with ``factor`` [P] from the rule for norms.

    ``changed`` [P] counts the elements that the first rule changed; ``norm`` and ``norm_after`` [P] are before and
    after the second rule, None where no rule needs them.
    """

    step: Step
    elements: ElementClip
    factor: Tensor
    changed: Tensor
    norm: Tensor | None
    norm_after: Tensor | None


# --- the first pass ---


def measure(batches: Sequence[Batch]) -> list[Measured]:
    """max|g| of each parameter, with one collective per process group for all batches."""
    groups = [batch.groups for batch in batches]
    own, piece_amaxes, piece_squares = zip(*map(_measure_shards, batches), strict=True)
    # In every group, so that a rank also skips the step for gradients of which it has no part.
    largest = torch.cat([rows[0].to(own[0].device) for rows in own]).amax()
    every_group = tuple(dict.fromkeys(chain.from_iterable(groups)))
    *whole, largest = all_reduce_([*own, largest], [*groups, every_group], dist.ReduceOp.MAX)
    finite = largest.isfinite()
    return [
        Measured(rows[0], rows[1] if len(rows) > 1 else None, finite.to(batch.device), *of_pieces)
        for batch, rows, *of_pieces in zip(batches, whole, piece_amaxes, piece_squares, strict=True)
    ]


def _measure_shards(batch: Batch) -> tuple[Tensor, list[Tensor], list[list[Tensor | None]]]:
    """The rows max|g| and, where masters need a scale, max|p|; then the maxima and squares of pieces."""
    piece_amaxes: list[Tensor] = []
    piece_squares: list[list[Tensor | None]] = []
    # Taken while a piece is in the cache. The second pass then reads only the few pieces that are clipped.
    sums = batch.on_host and batch.measures_norms and batch.options["element_clip"] != "spike_clip"
    for gradient in batch.gradients:
        amaxes: list[Tensor] = []
        squares: list[Tensor | None] = []
        for (piece,) in clipping.pieces(gradient):
            amaxes.append(clipping.amax(piece).to(batch.dtype))
            squares.append(clipping.sum_of_squares(piece.to(batch.dtype)) if sums else None)
        piece_amaxes.append(torch.stack(amaxes or [batch.zero]))
        piece_squares.append(squares)
    shards = zip(piece_amaxes, batch.members, strict=True)
    amax = torch.stack([batch.zero - 1 if member.gradient is None else own.amax() for own, member in shards])
    rows = torch.where(amax <= _largest_usable(batch), amax, torch.inf).unsqueeze(0)  # NaN is not <=
    if batch.options["master_weights"] is not None:
        weights = [clipping.amax(member.shard).to(batch.dtype) for member in batch.members]
        rows = torch.cat([rows, torch.stack(weights).unsqueeze(0)])
    return rows, piece_amaxes, piece_squares


def _largest_usable(batch: Batch) -> float:
    """The largest element that a gradient may have: its square must fit, unless a rule scales it down first."""
    options = batch.options
    rule, limit = options["norm_clip"], clipping.largest_root(batch.dtype, options["squares_summed"])
    is_brought_down = rule == "ada_gn" or (rule == "grad_clip" and options["max_norm"] <= limit)
    return torch.finfo(batch.dtype).max if is_brought_down else limit


# --- the rules, and the second pass ---


def clip(batches: Sequence[Batch], measured: Sequence[Measured]) -> list[Clipped]:
    """Applies the rules; one collective per process group, if any rule needs norms."""
    begun = [_begin(batch, seen) for batch, seen in zip(batches, measured, strict=True)]
    normed = [index for index, batch in enumerate(batches) if batch.measures_norms]
    own = [_squares(batches[index], measured[index], *begun[index]) for index in normed]
    sums = all_reduce_(own, [batches[index].groups for index in normed], dist.ReduceOp.SUM)
    norms = {index: _norms(begun[index], whole) for index, whole in zip(normed, sums, strict=True)}
    bounded = [norms[index].whole for index in normed if batches[index].options["norm_clip"] == "grad_clip"]
    total = clipping.norm_of(torch.cat([norm.to(bounded[0].device) for norm in bounded])) if bounded else None
    result = []
    for index, (batch, (step, elements, _)) in enumerate(zip(batches, begun, strict=True)):
        norm = norms.get(index)
        if norm is None:
            ones, zeros = torch.ones_like(step.weight), torch.zeros_like(step.weight)
            result.append(Clipped(step, elements, ones, zeros, None, None))
        else:
            factor = _factor(batch, step, norm, total)
            result.append(Clipped(step, elements, factor, norm.changed, norm.whole, norm.whole * factor))
    return result


class _Begun(NamedTuple):
    """What the maxima decide; ``unit`` [P] is the unit of norms, chosen so that their squares fit."""

    step: Step
    elements: ElementClip
    unit: Tensor


def _begin(batch: Batch, measured: Measured) -> _Begun:
    options, dtype = batch.options, batch.dtype
    taken = measured.finite & (measured.amax >= 0)
    scalars = {name: torch.stack([member.state[name] for member in batch.members]) for name in batch.names}
    if options["reset_interval"] is not None:  # MoRet
        reset = taken & ((scalars["steps"] + 1) % options["reset_interval"] == 0)
        scalars["steps_since_reset"] = torch.where(reset, 0, scalars["steps_since_reset"])
        scalars["mean_weight"] = torch.where(reset, 0.0, scalars["mean_weight"])
    step, amax = Step(taken, taken.to(dtype), scalars), torch.where(taken, measured.amax, 0.0)
    elements = ElementClip(None, dtype)
    if options["element_clip"] == "spike_clip":
        k, beta2 = step.steps_since_reset(), options["spike_decay"]  # v has the bias that the paper's has
        v_weight = -torch.expm1(k.to(dtype) * math.log(beta2)) if beta2 else torch.ones_like(step.weight)
        limits = torch.where(k < SPIKE_CLIP_AFTER, torch.inf, options["spike_threshold"] * v_weight)
        elements = ElementClip("spike_clip", dtype, batch.scalars(limits))
    elif options["element_clip"] == "ada_clip":
        threshold = scalars["threshold"].lerp_(amax, step.averaging(options["gamma3"], scalars["steps"]))
        limits_ratios = batch.scalars(threshold), batch.scalars(clipping.clip_ratio(amax, threshold))
        touched = None
        if batch.on_host:
            pieces = zip(measured.piece_amaxes, threshold, strict=True)
            touched = [(piece > limit).tolist() for piece, limit in pieces]
        elements = ElementClip("ada_clip", dtype, *limits_ratios, touched)
        amax = torch.minimum(amax, threshold)
    # Squares are summed in units of the largest element after the clip where they would not fit otherwise.
    fits = (amax > _SMALL) & (amax < _LARGE)
    return _Begun(step, elements, torch.where(fits, 1.0, amax.clamp(min=torch.finfo(dtype).tiny)))


def _squares(batch: Batch, measured: Measured, step: Step, elements: ElementClip, units: Tensor) -> Tensor:
    """Σg² of the shards after the rule for elements, in units², and the number of changed elements: [2, P]."""
    columns = []
    for index, unit in enumerate(batch.scalars(units)):
        squares, counts = [batch.zero], [batch.zero]
        for number, (piece, v) in enumerate(gradient_pieces(batch, index, step)):
            known = measured.piece_squares[index][number]
            if known is not None and unit == 1 and not elements.may_change(index, number):
                squares.append(known)
                continue
            clipped, changed = elements(piece, index, number, v)
            squares.append(clipping.sum_of_squares(clipped if batch.on_host and unit == 1 else clipped / unit))
            if changed is not None:
                counts.append(torch.count_nonzero(changed))
        columns.append(torch.stack([torch.stack(squares).sum(), torch.stack(counts).sum().to(batch.dtype)]))
    return torch.stack(columns, dim=1)


class _Norms(NamedTuple):
    """Norms of whole gradients after the rule for elements, also in units, and numbers of changed elements; [P]."""

    whole: Tensor
    in_units: Tensor
    unit: Tensor
    changed: Tensor


def _norms(begun: _Begun, sums: Tensor) -> _Norms:
    squares, changed = torch.where(begun.step.taken, sums, 0.0)
    norm = squares.sqrt()
    return _Norms((norm * begun.unit).clamp_(max=torch.finfo(sums.dtype).max), norm, begun.unit, changed)


def _factor(batch: Batch, step: Step, norm: _Norms, total: Tensor | None) -> Tensor:
    """The factor of AdaGN or GradClip, [P]. ``total``: the norm of all gradients under GradClip, 0-d."""
    options, scalars = batch.options, step.scalars
    if options["norm_clip"] == "ada_gn":
        decay = options["gamma1"] * decay_factor(batch, step)
        weight, weights = clipping.growing_weight(1 - decay, scalars["norm_mean_weight"])
        scalars["norm_mean_weight"] = torch.where(step.taken, weights, scalars["norm_mean_weight"])
        usual = norm.whole.clamp(max=clipping.largest_root(batch.dtype))  # one above counts as that: n² has to fit
        mean = scalars["norm_mean"].lerp_(usual, step.weight * weight)
        mean_square = scalars["norm_mean_square"]
        mean_square.lerp_(usual.square(), step.averaging(options["gamma2"], scalars["steps"]))
        ratio = clipping.norm_ratio(norm.in_units, mean, mean_square, options["norm_eps"])
        return (ratio / norm.unit).clamp_(max=torch.finfo(batch.dtype).max)
    if options["norm_clip"] == "grad_clip":
        assert total is not None
        bound = options["max_norm"] / (total.to(batch.device) + 1e-6)
        return bound.clamp(max=1.0).expand_as(step.weight)
    return torch.ones_like(step.weight)


def decay_factor(batch: Batch, step: Step) -> Scalar:
    """The factor on γ1 and β1: a cosine from 1 to 0.5 over `total_steps`, then 0.5; [P], or 1."""
    total = batch.options["total_steps"]
    return 1.0 if total is None else clipping.along_cosine(1.0, 0.5, step.scalars["steps"] + 1, total, batch.dtype)
