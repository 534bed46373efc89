"""The third stage of a step: Adam, applied to gradients that the rules have clipped (see `guards`).

    MoRet         when t mod ΔT = 0:  k ← 0, before g enters the moments       (in `guards`)
    guards        g ← factor·clip(g)
    Adam          μ ← μ + w₁·(g − μ);   ν ← ν + w₂·(g² − ν);   p ← p·(1 − lr·λ) − lr·μ/(√ν + ε);   k ← k + 1

μ and ν are bias-corrected: with w = (1 − β)/(1 − βᵏ⁺¹) they are the textbooks' m̂ and v̂. t counts the steps taken, k
those since the last reset; k = 0 makes w = 1. A skipped step multiplies every w, lr and count by 0, on the device.
``p.grad`` is never written. The elements are the matter of `passes`.
"""

import torch
from torch import Tensor

from lightning_lowbit.optim import clipping
from lightning_lowbit.optim.batch import Batch, Step
from lightning_lowbit.optim.clipping import Scalar
from lightning_lowbit.optim.guards import Clipped, Measured, decay_factor
from lightning_lowbit.optim.passes import Update

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
    rate = lr * step.weight
    factor = torch.where(taken, clipped.factor, 0.0)  # a square that does not fit, times a weight of 0, is NaN
    if options["maximize"]:
        factor = -factor
    kept, old_scale, new_scale = [], None, None
    if measured.weight_amax is not None:
        kept = [member.state["master_scale"] for member in batch.members]
        old_scale = torch.stack(kept)
        # A power of two that leaves room for the step: weights may be far smaller than that, which is at most seven
        # learning rates at the usual betas.
        exponent = torch.frexp(measured.weight_amax + 2 * lr).exponent - 14
        new_scale = torch.ldexp(torch.ones_like(step.weight), exponent)
    numbers = Update(
        factor,
        weight1 * step.weight,
        weight2,
        rate * _warmth(batch, step),
        rate * options["weight_decay"],
        old_scale,
        new_scale,
    )
    batch.passes.update(step, clipped.elements, numbers)
    if old_scale is not None and new_scale is not None:
        torch._foreach_copy_(kept, list(torch.where(taken, new_scale, old_scale).float().unbind()))
    step.scalars["steps_since_reset"] = k + taken  # only now: random bits depend on the last reset


def _learning_rate(batch: Batch, step: Step) -> Scalar:
    lr: Scalar = batch.options["lr"]
    return lr.to(step.weight, non_blocking=True) if isinstance(lr, Tensor) else lr


def _warmth(batch: Batch, step: Step) -> Tensor:
    """Share of the learning rate [P]: after each reset a cosine from 0.01 to 1 over `warmup_steps`."""
    over, k = batch.options["warmup_steps"], step.scalars["steps_since_reset"]
    if not over:
        return torch.ones_like(step.weight)
    rising = clipping.along_cosine(_WARMUP_FROM, 1.0, k, over, batch.dtype)
    return torch.where(step.scalars["steps"] > k, rising, 1.0)  # the start is no reset
