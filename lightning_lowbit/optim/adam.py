"""The third stage of a step: Adam, applied to gradients that the rules have clipped (see `guards`).

    MoRet         when t mod ΔT = 0:  k ← 0, before g enters the moments       (in `guards`)
    guards        g ← factor·clip(g)
    Adam          μ ← μ + w₁·(g − μ);   ν ← ν + w₂·(g² − ν);   p ← p·(1 − lr·λ) − lr·μ/(√ν + ε);   k ← k + 1

μ and ν are bias-corrected: with w = (1 − β)/(1 − βᵏ⁺¹) they are the textbooks' m̂ and v̂. t counts the steps taken, k
those since the last reset; k = 0 makes w = 1. A skipped step multiplies every w, lr and count by 0, on the device.
Tensors are handled in pieces that fit a cache, and ``p.grad`` is never written.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.optim import clipping
from lightning_lowbit.optim.batch import Batch, Step, pieces_of
from lightning_lowbit.optim.clipping import Scalar
from lightning_lowbit.optim.guards import Clipped, Measured, decay_factor

# Share of the learning rate just after a reset, where a warm-up follows (SPAM's "death rate" is .99).
_WARMUP_FROM = 0.01


def update(batch: Batch, measured: Measured, clipped: Clipped) -> None:
    """Applies Adam to a batch: parameters, moments and master weights."""
    options, step = batch.options, clipped.step
    taken, k, mean_weight = step.taken, step.scalars["steps_since_reset"], step.scalars["mean_weight"]
    weight1, weights = clipping.growing_weight(1 - options["betas"][0] * decay_factor(batch, step), mean_weight)
    step.scalars["mean_weight"] = torch.where(taken, weights, mean_weight)
    weight2 = step.averaging(options["betas"][1], k)  # both are 1 after a reset: the past is gone
    lr = _learning_rate(batch, step)
    master_scales = None
    if measured.weight_amax is not None:  # a power of two that leaves room for the step
        # Weights may be far smaller than a step, which is at most seven learning rates at the usual betas.
        exponent = torch.frexp(measured.weight_amax + 2 * lr).exponent - 14
        master_scales = torch.ldexp(torch.ones_like(step.weight), exponent)
    rate = lr * step.weight
    factor = torch.where(taken, clipped.factor, 0.0)  # a square that does not fit, times a weight of 0, is NaN
    if options["maximize"]:
        factor = -factor
    columns = (factor, weight1 * step.weight, weight2, rate * _warmth(batch, step), rate * options["weight_decay"])
    numbers = zip(*map(batch.scalars, columns), strict=True)
    skipped = [not one for one in batch.scalars(taken)] if batch.on_host else [False] * len(batch.members)
    for index, scalars in enumerate(numbers):
        if not skipped[index]:
            _update_one(batch, index, clipped, master_scales, *scalars)
    if master_scales is not None:
        kept = [member.state["master_scale"] for member in batch.members]
        scales = torch.where(taken, master_scales, torch.stack(kept))
        torch._foreach_copy_(kept, list(scales.float().unbind()))
    step.scalars["steps_since_reset"] = k + taken  # only now: random bits depend on the last reset


def _learning_rate(batch: Batch, step: Step) -> Scalar:
    lr: Scalar = batch.options["lr"]
    if batch.on_host:
        return float(lr)
    return lr.to(step.weight, non_blocking=True) if isinstance(lr, Tensor) else lr


def _warmth(batch: Batch, step: Step) -> Tensor:
    """Share of the learning rate [P]: after each reset a cosine from 0.01 to 1 over `warmup_steps`."""
    over, k = batch.options["warmup_steps"], step.scalars["steps_since_reset"]
    if not over:
        return torch.ones_like(step.weight)
    rising = clipping.along_cosine(_WARMUP_FROM, 1.0, k, over, batch.dtype)
    return torch.where(step.scalars["steps"] > k, rising, 1.0)  # the start is no reset


# fmt: off
def _update_one(
    batch: Batch, index: int, clipped: Clipped, master_scales: Tensor | None,
    factor: Any, weight1: Any, weight2: Any, rate: Any, decay: Any,
) -> None:  # fmt: on
    options, member, step = batch.options, batch.members[index], clipped.step
    moments = member.moments
    pieces = pieces_of(batch, index, step, member.shard, batch.gradients[index])
    for number, (p, g, piece) in enumerate(pieces):
        mean, mean_square = moments.load(piece)
        gradient = clipped.elements.scaled(moments.select(g, piece), index, number, mean_square, factor)
        if moments.is_sparse and options["weight_decay"]:
            p.mul_(1 - decay)  # all elements, also those that have no moments
        weights, master = moments.select(p, piece), piece.state.get("master")
        if master is not None:
            scale = member.state["master_scale"]  # 0 before the first step
            weights = torch.where(scale > 0, master.to(batch.dtype) * scale, weights.to(batch.dtype))
        work = weights.to(batch.dtype)
        can_fuse = batch.on_host and all(tensor.is_contiguous() for tensor in (work, mean, mean_square))
        decays = options["weight_decay"] and not moments.is_sparse
        rule = fused_adam_ if can_fuse else adam_
        rule(work, gradient, mean, mean_square, weight1, weight2, rate, decay if decays else 0.0, options["eps"])
        if master is not None:
            assert master_scales is not None
            work = _round_to_master(master, work, master_scales[index], step.taken[index])
        moments.restore(p, work, piece)
        moments.store(piece, mean, mean_square)


def _round_to_master(master: Tensor, work: Tensor, scale: Tensor, taken: Tensor) -> Tensor:
    """Rounds weights to fp16 masters, and returns what these decode to; a skipped step changes neither."""
    largest = torch.finfo(torch.float16).max
    scaled = (work / scale).clamp_(-largest, largest).to(torch.float16)
    master.copy_(torch.where(taken, scaled, master))
    return torch.where(taken, scaled.to(work.dtype) * scale, work)


# fmt: off
def adam_(
    parameter: Tensor, gradient: Tensor, mean: Tensor, mean_square: Tensor,   # any one shape, dtype of the statistics
    weight1: Scalar, weight2: Scalar, rate: Scalar, decay: Scalar,            # 0-d tensors or numbers
    eps: float,
) -> None:  # fmt: on
    """Applies a piece of a gradient in place, and overwrites it. Weights, rate and decay of 0 change nothing else.

    ``rate`` is the learning rate of this step; ``decay``, the share that the parameter loses first.
    """
    gradient.nan_to_num_(0.0, 0.0, 0.0)  # of a skipped step: 0·NaN is NaN
    mean.lerp_(gradient, weight1)
    mean_square.lerp_(gradient.square_(), weight2)
    direction = torch.div(mean, torch.sqrt(mean_square, out=gradient).add_(eps), out=gradient)
    if isinstance(decay, Tensor) or decay:
        parameter.mul_(1 - decay)
    parameter.sub_(direction.mul_(rate))


# fmt: off
def fused_adam_(
    parameter: Tensor, gradient: Tensor, mean: Tensor, mean_square: Tensor,   # all contiguous but the gradient
    weight1: float, weight2: float, rate: float, decay: float,
    eps: float,
) -> None:  # fmt: on
    """`adam_` by torch's fused kernel, for scalars that are numbers: with β = 1 − w it is the same rule."""
    torch._fused_adamw_(
        [parameter], [gradient.contiguous()], [mean], [mean_square], [], [_LATE],
        lr=rate, beta1=1 - weight1, beta2=1 - weight2, weight_decay=decay / rate if rate else 0.0, eps=eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip


# A step count at which 1 − βᵗ is 1: the moments are bias-corrected already, and the fused kernel must not do it again.
_LATE = torch.tensor(1e9, device="cpu")
