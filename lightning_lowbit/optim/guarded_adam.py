"""Adam behind clipping rules: the engine of StableSPAM, SPAM and LowBitAdamW, which differ only in their options.

    MoRet         when t mod ΔT = 0:  k ← 0, before g enters the moments       (in `guards`)
    guards        g ← factor·clip(g)
    Adam          μ ← μ + w₁·(g − μ);   ν ← ν + w₂·(g² − ν);   p ← p·(1 − lr·λ) − lr·μ/(√ν + ε);   k ← k + 1

μ and ν are bias-corrected: with w = (1 − β)/(1 − βᵏ⁺¹) they are the textbooks' m̂ and v̂. t counts the steps taken, k
those since the last reset; k = 0 makes w = 1. A skipped step multiplies every w, lr and count by 0, on the device.
``p.grad`` is never written. Here are the numbers of each parameter; what is done with them is in `passes`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_lowbit.distributed import Sharding, local
from lightning_lowbit.optim import clipping
from lightning_lowbit.optim.batch import SCALARS, Batch, Step, remember
from lightning_lowbit.optim.clipping import Scalar
from lightning_lowbit.optim.guarded_optimizer import GuardedOptimizer
from lightning_lowbit.optim.guards import Clipped, Measured, decay_factor
from lightning_lowbit.optim.moments import DenseMoments, Entries, FP8Moments, moments_of, statistics_dtype
from lightning_lowbit.optim.options import check_options
from lightning_lowbit.optim.passes import Update


class _Dtypes(NamedTuple):
    value: str
    of: set[torch.dtype]
    advice: str


_LOW = {torch.bfloat16, torch.float16}
_DTYPES = {
    "master_weights": _Dtypes("fp16", _LOW, "leave it out, or convert the model with .to(torch.bfloat16)"),
    "moments": _Dtypes("fp8", {*_LOW, torch.float32}, "float64 is asked for where digits count, so use moments='fp32'"),
}


# All that a state may hold apart from scalars.
_KEPT = {*FP8Moments.names, "master"}

# Share of the learning rate just after a reset, where a warm-up follows (SPAM's "death rate" is .99).
_WARMUP_FROM = 0.01


class GuardedAdam(GuardedOptimizer):
    """Adam with all options of this package, for parameters of any real floating dtype, whole or sharded.

    Options (those of `DEFAULTS`, described in `options`) belong to the parameter group and are read at each step.

    State of a parameter, on its device; statistics are fp32 (float64 for float64 parameters) and bias-corrected:
    ``steps`` t and ``steps_since_reset`` k (int64, 0-d); ``threshold``, ``norm_mean``, ``norm_mean_square`` (0-d);
    ``norm_mean_weight``, ``mean_weight`` (0-d), the total weight in an average; ``mean`` μ and ``mean_square`` ν (the
    parameter's shape, see `moments`).
    """

    SCALARS = (*SCALARS, "steps_since_reset", "mean_weight")

    #: Values of the options that a subclass does not set.
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "maximize": False,
        "element_clip": None,
        "gamma3": 0.999,
        "spike_threshold": 5000.0,
        "norm_clip": None,
        "gamma1": 0.7,
        "gamma2": 0.9,
        "max_norm": 1.0,
        "reset_interval": None,
        "warmup_steps": 0,
        "total_steps": None,
        "matrices_only": False,
        "moments": "fp32",
        "master_weights": None,
        "density": 1.0,
    }

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, {**self.DEFAULTS, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        options = {**self.defaults, **param_group}
        self._check_options(options)
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        there = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
        for name, dtypes in _DTYPES.items():
            if options[name] == dtypes.value and not there <= dtypes.of:
                self.param_groups.pop()
                self._remember_parameters()
                raise ValueError(
                    f"{name}={dtypes.value!r} is for parameters in {', '.join(sorted(map(str, dtypes.of)))}, got "
                    f"{', '.join(sorted(map(str, there)))}: {dtypes.advice}."
                )

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_options(type(self).__name__, options)
        alone = {"moments": "fp32", "norm_clip": None, "master_weights": None}
        given = {name: options[name] for name in alone}
        if options["density"] < 1 and given != alone:
            raise ValueError(
                f"{type(self).__name__} keeps sparse moments (density={options['density']}) in fp32, without a rule "
                f"for norms and without master_weights; got {given}."
            )

    @torch.no_grad()
    def reset_moments(self) -> None:
        """Resets Adam's moments of all parameters, as MoRet does; statistics and master weights stay."""
        for state in self.state.values():
            for name in ("steps_since_reset", "mean_weight"):  # the old moments then have weight 0 in the next step
                if name in state:
                    state[name].zero_()

    def _rules(self, group: Mapping[str, Any]) -> dict[str, Any]:
        own = {"norm_eps": group["eps"], "spike_decay": group["betas"][1], "squares_summed": 1, "sums_in_update": True}
        return {**group, **own}

    def _apply(
        self, batches: Sequence[Batch], measured: Sequence[Measured], clipped: Sequence[Clipped]
    ) -> list[Tensor | None]:
        sums = []
        for batch, seen, of_batch in zip(batches, measured, clipped, strict=True):
            sums.append(_update(batch, seen, of_batch))
            remember(batch, of_batch.step)
        return sums

    def _kept(
        self, parameter: Tensor, group: Mapping[str, Any], sharding: Sharding
    ) -> tuple[dict[str, Tensor], DenseMoments, dict[str, Tensor]]:
        moments, has_master = self._format(group, len(sharding.shape))
        if sharding.is_flat and moments.draws:
            raise ValueError(
                "Under FSDP1 a rank holds a stretch of a matrix and no rows: FP8 and sparse moments need "
                "ModelParallelStrategy (FSDP2), DDP, or FSDP1 with sharding_strategy='NO_SHARD'. "
                "Or pass moments='fp32' and density=1."
            )
        state = self.state[parameter] or self._new_state(parameter, moments, has_master)
        kept, wanted = _KEPT & set(state), (*moments.names, *(["master"] if has_master else []))
        if kept != set(wanted):
            raise ValueError(
                f"Of a parameter of {tuple(parameter.shape)} {', '.join(sorted(kept))} are kept, and not "
                f"{', '.join(sorted(wanted))}: moments and master_weights cannot be changed in mid-training; build a "
                "new optimizer."
            )
        return state, moments, {name: local(state[name]) for name in wanted}

    def _format(self, group: Mapping[str, Any], dims: int) -> tuple[DenseMoments, bool]:
        """The format of moments of a parameter of so many dimensions, and whether there are master weights."""
        return moments_of(group["moments"], group["density"], dims), group["master_weights"] is not None

    def _entries(self, shard: Tensor, group: Mapping[str, Any]) -> Entries:
        moments, has_master = self._format(group, shard.dim())
        masters: Entries = {"master": (shard.shape, torch.float16), "master_scale": ((), torch.float32)}
        entries = super()._entries(shard, group) | moments.entries(shard.shape, statistics_dtype(shard))
        return entries | masters if has_master else entries

    def _new_state(self, parameter: Tensor, moments: DenseMoments, has_master: bool) -> dict[str, Tensor]:
        dtype, device = statistics_dtype(parameter), local(parameter).device
        made = self.new_scalars(device, dtype) | moments.new_state(parameter, dtype)
        if has_master:
            made["master"] = torch.zeros_like(parameter, dtype=torch.float16)
            made["master_scale"] = torch.zeros((), dtype=torch.float32, device=device)
        state: dict[str, Tensor] = self.state[parameter]
        state.update(made)
        return state


def _update(batch: Batch, measured: Measured, clipped: Clipped) -> Tensor | None:
    """Applies Adam to a batch: parameters, moments and master weights. Returns sums that nothing needed before."""
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
        clipped.unit if batch.sums_in_update else None,
    )
    sums = batch.passes.update(step, clipped.elements, numbers)
    if old_scale is not None and new_scale is not None:
        torch._foreach_copy_(kept, list(torch.where(taken, new_scale, old_scale).float().unbind()))
    step.scalars["steps_since_reset"] = k + taken  # only now: random bits depend on the last reset
    return sums


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
