"""The first two stages of a step: measure gradients, then clip them by the rules of their group.

    measure     max|g| of each parameter                              one MAX over the ranks that hold shards of it
    clip        elements: AdaClip or SpikeClip
                Σg² after that, and how many elements changed         one SUM over these ranks
                norms: AdaGN or GradClip

All numbers are of whole tensors, and known before any element changes. Only the sums are not where no rule for norms
waits for them: Adam's update makes these, and their SUM follows it.

A step is skipped if max|g| is NaN or Inf, or if an element's square does not fit (9e18 in fp32), unless a rule for
norms scales it down: every weight of an average and every count is then multiplied by 0, on the device. A parameter
without a gradient on any rank has max|g| = −1, and does not take the step.
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
from lightning_lowbit.optim.batch import Batch, Step
from lightning_lowbit.optim.clipping import Scalar
from lightning_lowbit.optim.passes import ElementClip

# Squares of gradients within these need no unit to fit fp32; neither does the sum of 2^40 of them.
_SMALL, _LARGE = 1e-12, 1e12

# SpikeClip waits until so many gradients are in the second moment.
SPIKE_CLIP_AFTER = 20


class Measured(NamedTuple):
    """What the first pass finds.

    ``amax`` is max|g| of whole gradients, [P]: Inf where the step must be skipped, −1 without a gradient.
    ``weight_amax`` is max|p| of whole parameters, [P], where master weights need a scale. ``finite`` is 0-d: whether
    all gradients of all parameters are finite.
    """

    amax: Tensor
    weight_amax: Tensor | None
    finite: Tensor


class Clipped(NamedTuple):
    """The result of the rules: g ← factor · elements(g), with ``factor`` [P] from the rule for norms.

    ``unit`` [P] is that of norms, chosen so that their squares fit. ``changed`` [P] counts the elements that the first
    rule changed; ``norm`` and ``norm_after`` [P] are before and after the second rule, None without any rule.
    """

    step: Step
    elements: ElementClip
    unit: Tensor
    factor: Tensor
    changed: Tensor
    norm: Tensor | None
    norm_after: Tensor | None


# --- the first pass ---


def measure(batches: Sequence[Batch]) -> list[Measured]:
    """max|g| of each parameter, with one collective per process group for all batches."""
    groups, own = [batch.groups for batch in batches], [_measure_shards(batch) for batch in batches]
    # In every group, so that a rank also skips the step for gradients of which it has no part.
    largest = torch.cat([rows[0].to(own[0].device) for rows in own]).amax()
    every_group = tuple(dict.fromkeys(chain.from_iterable(groups)))
    *whole, largest = all_reduce_([*own, largest], [*groups, every_group], dist.ReduceOp.MAX)
    finite = largest.isfinite()
    return [
        Measured(rows[0], rows[1] if len(rows) > 1 else None, finite.to(batch.device))
        for batch, rows in zip(batches, whole, strict=True)
    ]


def _measure_shards(batch: Batch) -> Tensor:
    """The rows max|g| and, where masters need a scale, max|p|."""
    amax = batch.passes.measure()
    rows = [torch.where(amax <= _largest_usable(batch), amax, torch.inf)]  # NaN is not <=
    if batch.options["master_weights"] is not None:
        rows.append(batch.passes.measure_weights())
    return torch.stack(rows)


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
    own = [batches[index].passes.squares(*begun[index]) for index in normed]
    sums = all_reduce_(own, [batches[index].groups for index in normed], dist.ReduceOp.SUM)
    norms = {index: _norms(begun[index], whole) for index, whole in zip(normed, sums, strict=True)}
    bounded = [norms[index].whole for index in normed if batches[index].options["norm_clip"] == "grad_clip"]
    total = clipping.norm_of(torch.cat([norm.to(bounded[0].device) for norm in bounded])) if bounded else None
    result = []
    for index, (batch, decided) in enumerate(zip(batches, begun, strict=True)):
        norm = norms.get(index)
        if norm is None:
            ones, zeros = torch.ones_like(decided.unit), torch.zeros_like(decided.unit)
            result.append(Clipped(*decided, ones, zeros, None, None))
        else:
            factor = _factor(batch, decided.step, norm, total)
            result.append(Clipped(*decided, factor, norm.changed, norm.whole, norm.whole * factor))
    return result


def add_sums(batches: Sequence[Batch], clipped: Sequence[Clipped], own: Sequence[Tensor | None]) -> list[Clipped]:
    """Completes the results of batches without a rule for norms by what their update summed of this rank's shards, None
    for the others; one collective per process group."""
    result, there = list(clipped), {index: sums for index, sums in enumerate(own) if sums is not None}
    whole = all_reduce_([*there.values()], [batches[index].groups for index in there], dist.ReduceOp.SUM)
    for index, sums in zip(there, whole, strict=True):
        norm = _norms(clipped[index], sums)
        result[index] = clipped[index]._replace(changed=norm.changed, norm=norm.whole, norm_after=norm.whole)
    return result


class _Begun(NamedTuple):
    """What the maxima decide: the first fields of `Clipped`."""

    step: Step
    elements: ElementClip
    unit: Tensor


def _begin(batch: Batch, measured: Measured) -> _Begun:
    options, dtype = batch.options, batch.dtype
    taken = measured.finite & (measured.amax >= 0)
    scalars = batch.passes.load_scalars()
    if options["reset_interval"] is not None:  # MoRet
        reset = taken & ((scalars["steps"] + 1) % options["reset_interval"] == 0)
        scalars["steps_since_reset"] = torch.where(reset, 0, scalars["steps_since_reset"])
        scalars["mean_weight"] = torch.where(reset, 0.0, scalars["mean_weight"])
    step, amax = Step(taken, taken.to(dtype), scalars), torch.where(taken, measured.amax, 0.0)
    elements = ElementClip(None, torch.full_like(amax, torch.inf), torch.ones_like(amax))
    if options["element_clip"] == "spike_clip":
        k, beta2 = step.steps_since_reset(), options["spike_decay"]  # v has the bias that the paper's has
        v_weight = -torch.expm1(k.to(dtype) * math.log(beta2)) if beta2 else torch.ones_like(step.weight)
        limits = torch.where(k < SPIKE_CLIP_AFTER, torch.inf, options["spike_threshold"] * v_weight)
        elements = ElementClip("spike_clip", limits, elements.ratio)
    elif options["element_clip"] == "ada_clip":
        threshold = scalars["threshold"].lerp_(amax, step.averaging(options["gamma3"], scalars["steps"]))
        elements = ElementClip("ada_clip", threshold, clipping.clip_ratio(amax, threshold))
        amax = torch.minimum(amax, threshold)
    # Squares are summed in units of the largest element after the clip where they would not fit otherwise.
    fits = (amax > _SMALL) & (amax < _LARGE)
    return _Begun(step, elements, torch.where(fits, 1.0, amax.clamp(min=torch.finfo(dtype).tiny)))


class _Norms(NamedTuple):
    """Norms of whole gradients after the rule for elements, also in units, and numbers of changed elements; [P]."""

    whole: Tensor
    in_units: Tensor
    unit: Tensor
    changed: Tensor


def _norms(begun: _Begun | Clipped, sums: Tensor) -> _Norms:
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
