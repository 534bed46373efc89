"""Stable-SPAM, SPAM and AdamW for low-bit training: one Adam behind clipping rules, with different options.

    MoRet         when t mod ΔT = 0:  k ← 0, before g enters the moments
    rules         g ← factor·clip(g)                                   (AdaClip, AdaGN, ..., see `rules`)
    Adam          μ ← μ + w₁·(g − μ);   ν ← ν + w₂·(g² − ν);   p ← p·(1 − lr·λ) − lr·μ/(√ν + ε);   k ← k + 1

μ and ν are bias-corrected: with w = (1 − β)/(1 − βᵏ⁺¹) they are the textbooks' m̂ and v̂. t counts all steps, k the
steps since the last reset; k = 0 makes w = 1. A skipped step multiplies every w, lr and count by 0, on the device.
``p.grad`` is never written. Here is one number per parameter; `passes` applies them to the elements.

Sources:
    Stable-SPAM: the Stable-SPAM thesis, chapter 3 and algorithm A.1. As in the authors' code, ε stands outside the
    roots. The authors have one counter, which inflates the threshold after each reset; here the rules and the moments
    have separate ones.

    SPAM (arXiv 2501.06842), algorithm 1 and section 4.1 for the values. As in the authors' code, SpikeClip's v is
    Adam's second moment without bias correction. Their bias correction counts the steps since the start, which makes
    the first steps after a reset up to 6.6 times too long; here it restarts with the moments.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_lowbit._torch import foreach_copy_
from lightning_lowbit._torch.devices import frexp, power_of_two
from lightning_lowbit.checks import choose
from lightning_lowbit.distributed import Sharding, local, sharding_of
from lightning_lowbit.optim.moments import DenseMoments, Entries, FP8Moments, moments_of, statistics_dtype
from lightning_lowbit.optim.optimizer import ClippedOptimizer
from lightning_lowbit.optim.passes import SCALARS, Batch
from lightning_lowbit.optim.rules import (
    MUON,
    OPTIONS,
    GroupRules,
    Numbers,
    check_options,
    cosine,
    growing_weight,
    halving_decay,
    options_among,
    rules_of,
    step_weight,
)

# Values of options that only parameters in some dtypes may have, and an advice for others.
_LOW = {torch.bfloat16, torch.float16}
_DTYPES = {
    "master_weights": ("fp16", _LOW, "leave it out, or convert the model with .to(torch.bfloat16)"),
    "moments": ("fp8", {*_LOW, torch.float32}, "float64 is asked for where digits count, so use moments='fp32'"),
}

# The tensors that a state may hold.
_TENSORS = {*FP8Moments.names, "master"}

# Share of the learning rate just after a reset, where a warm-up follows (SPAM's "death rate" is .99).
_WARMUP_FROM = 0.01

#: γ1, γ2 of table A.2 (training in 4 bits) and table A.3 (BF16).
PRESETS = MappingProxyType(
    {
        "4-bit": {"gamma1": 0.7, "gamma2": 0.9, "gamma3": 0.999},
        "bf16": {"gamma1": 0.85, "gamma2": 0.99999, "gamma3": 0.999},
    }
)


def _check_dtypes(parameters: Sequence[Tensor], options: Mapping[str, Any]) -> None:
    """Raises a ``ValueError`` for parameters in a dtype that an option is not for."""
    for name, (value, possible, advice) in _DTYPES.items():
        present = {p.dtype for p in parameters if p.is_floating_point()} if options[name] == value else set()
        if not present <= possible:
            raise ValueError(
                f"{name}={value!r} is for parameters in {', '.join(sorted(map(str, possible)))}, got "
                f"{', '.join(sorted(map(str, present)))}: {advice}."
            )


class ClippedAdam(ClippedOptimizer):
    """Adam with all options of this package, for parameters of any real floating dtype, whole or sharded.

    Its options (all in `OPTIONS` but ``norm_eps``) belong to the parameter group and are read at each step.

    State of a parameter, on its device; statistics are fp32 (float64 for float64 parameters) and bias-corrected:
    ``steps`` t and ``steps_since_reset`` k (int64, 0-d); ``threshold``, ``norm_mean``, ``norm_mean_square`` (0-d);
    ``norm_mean_weight``, ``mean_weight`` (0-d), the total weight in an average; ``mean`` μ and ``mean_square`` ν (the
    parameter's shape, see `moments`).
    """

    SCALARS = (*SCALARS, "steps_since_reset", "mean_weight")

    #: Values of the options that a subclass does not set.
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        name: option.default for name, option in OPTIONS.items() if name not in ("norm_eps", *MUON)
    }

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, {**self.DEFAULTS, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        options = {**self.defaults, **param_group}
        self._check_options(options)
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            self._remember_parameters()
            raise

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raises a ``ValueError`` for parameters that options of their group are not for."""
        _check_dtypes(group["params"], group)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_options(type(self).__name__, options)
        needed = {"moments": "fp32", "norm_clip": None, "master_weights": None}
        values = {name: options[name] for name in needed}
        if options["density"] < 1 and values != needed:
            raise ValueError(
                f"{type(self).__name__} keeps sparse moments (density={options['density']}) in fp32, without a rule "
                f"for norms and without master_weights; got {values}."
            )

    @torch.no_grad()
    def reset_moments(self) -> None:
        """Resets Adam's moments of all parameters, as MoRet does; statistics and master weights stay."""
        for state in self.state.values():
            for name in ("steps_since_reset", "mean_weight"):  # the old moments then have weight 0 in the next step
                if name in state:
                    state[name].zero_()

    def _moments(self, parameter: Tensor, shape: torch.Size, group: Mapping[str, Any]) -> DenseMoments:
        """Returns the format of a parameter's moments; ``shape`` is that of the whole parameter."""
        return moments_of(group, len(shape))

    def _possible_moments(self, parameter: Tensor, sharding: Sharding, group: Mapping[str, Any]) -> DenseMoments:
        """Returns the format; a ``ValueError`` if it needs rows and FSDP1 cuts them."""
        moments = self._moments(parameter, sharding.shape, group)
        if sharding.is_flat and moments.needs_rows:
            raise ValueError(
                "Under FSDP1 a rank holds a stretch of a matrix and no rows: Muon, FP8 and sparse moments need "
                "ModelParallelStrategy (FSDP2), DDP, or FSDP1 with sharding_strategy='NO_SHARD'. Or take another "
                "optimizer, moments='fp32' and density=1."
            )
        return moments

    def _rules(self, group: Mapping[str, Any]) -> GroupRules:
        return GroupRules(
            *rules_of(group, norm_eps=group["eps"], beta2=group["betas"][1]),
            reset_interval=group["reset_interval"],
            warmup_steps=group["warmup_steps"],
            total_steps=group["total_steps"],
            has_masters=group["master_weights"] is not None,
        )

    def _apply(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._update(batch)
            batch.store_scalars()

    def _update(self, batch: Batch) -> None:
        _update(batch)

    def _member_state(
        self, parameter: Tensor, group: Mapping[str, Any], sharding: Sharding
    ) -> tuple[dict[str, Tensor], DenseMoments, dict[str, Tensor]]:
        moments, has_master = self._possible_moments(parameter, sharding, group), group["master_weights"] is not None
        _check_dtypes([parameter], group)  # again: the model may have been converted since
        state = self.state[parameter] or self._new_state(parameter, moments, has_master)
        present, needed = _TENSORS & set(state), (*moments.names, *(["master"] if has_master else []))
        if present != set(needed):
            raise ValueError(
                f"Of a parameter of {tuple(parameter.shape)} {', '.join(sorted(present))} are kept, and not "
                f"{', '.join(sorted(needed))}: moments and master_weights cannot be changed in mid-training; build a "
                "new optimizer."
            )
        return state, moments, {name: local(state[name]) for name in needed}

    def _fault(self, saved: Any, parameter: Tensor, group: Mapping[str, Any]) -> str:
        if fault := super()._fault(saved, parameter, group):
            self._possible_moments(parameter, sharding_of(parameter), group)  # raises if no state would fit
        return fault

    def _entries(self, parameter: Tensor, group: Mapping[str, Any]) -> Entries:
        shape = local(parameter).shape
        moments = self._moments(parameter, parameter.shape, group).entries(shape, statistics_dtype(parameter))
        masters: Entries = {"master": (shape, torch.float16), "master_scale": ((), torch.float32)}
        return super()._entries(parameter, group) | moments | (masters if group["master_weights"] is not None else {})

    def _new_state(self, parameter: Tensor, moments: DenseMoments, has_master: bool) -> dict[str, Tensor]:
        dtype, device = statistics_dtype(parameter), local(parameter).device
        tensors = self.new_scalars(device, dtype) | moments.new_state(parameter, dtype)
        if has_master:
            tensors["master"] = torch.zeros_like(parameter, dtype=torch.float16)
            tensors["master_scale"] = torch.zeros((), dtype=torch.float32, device=device)
        self.state[parameter].update(tensors)
        return self.state[parameter]


class StableSPAM(ClippedAdam):
    """Stable-SPAM, for parameters of any real floating dtype on any device, whole or sharded.

    Each rule can be chosen alone and per parameter group. Do not clip gradients elsewhere
    (``Trainer(gradient_clip_val=None)``): the rules must see them unclipped.

    Args:
        params: parameters, groups, or named parameters, as for every `torch.optim.Optimizer`.
        lr: learning rate; a float or a 0-d tensor. Table A.2: 1e-3 for LLaMA-130M, 4e-4 for 350M, 2e-4 for 1B.
        betas: β1, β2 of Adam's moments; algorithm A.1: .9, .999.
        eps: ε, in the norm's and in Adam's denominator; the authors' code: 1e-8.
        weight_decay: λ, decoupled; the authors' configurations: 0.
        preset: ``"4-bit"`` or ``"bf16"``: γ1, γ2 and γ3 where they are None.
        gamma1: γ1, average of the gradient norm; table A.2: .7 for 4 bits, table A.3: .85 for BF16.
        gamma2: γ2, average of its square; table A.2: .9 for 4 bits, table A.3: .99999 for BF16.
        gamma3: γ3 (θ in places), average of the largest element; tables A.2 and A.3: .999.
        reset_interval: ΔT, steps between resets of the moments; tables A.2 and A.3: 1000 (4-bit scripts: 500); or None.
        warmup_steps: steps after each reset in which the learning rate rises from a hundredth along a cosine; or 0.
        total_steps: steps over which β1 and γ1 halve along a cosine, as in the authors' scripts; None for no change.
        element_clip: ``"ada_clip"``; ``"spike_clip"``, SPAM's rule; or None.
        spike_threshold: θ of SpikeClip; section 4.1: 5000.
        norm_clip: ``"ada_gn"``; ``"grad_clip"``, a bound on the norm of all gradients together; or None.
        max_norm: that bound; section 4.1: 1.
        matrices_only: parameters below two dimensions get plain Adam.
        maximize: ascend.
        moments: ``"fp32"`` or ``"fp8"``, 8 or 2.06 bytes per parameter; parameters below two dimensions keep fp32.
        master_weights: ``"fp16"`` keeps a second, three bits longer copy of bfloat16 parameters, with one scale per
            tensor. Other code's writes into the parameters are then overwritten at the next step.

    Raises:
        ValueError: an option out of range, or, in `step`, a sparse or complex gradient, or an unknown sharding.

    Examples:
        >>> optimizer = StableSPAM(model.parameters(), lr=1e-3, moments="fp8")
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        preset: str = "4-bit",
        gamma1: float | None = None,
        gamma2: float | None = None,
        gamma3: float | None = None,
        reset_interval: int | None = 1000,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        element_clip: str | None = "ada_clip",
        spike_threshold: float = 5000.0,
        norm_clip: str | None = "ada_gn",
        max_norm: float = 1.0,
        matrices_only: bool = False,
        maximize: bool = False,
        moments: str = "fp32",
        master_weights: str | None = None,
    ) -> None:
        options = options_among(locals())
        defaults = {name: value for name, value in _preset(preset).items() if options[name] is None}
        super().__init__(params, **options | defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, also in mid-training, also with its own ``preset``; an option out of range is a ValueError."""
        group = dict(param_group)
        if "preset" in group:
            group = _preset(group.pop("preset")) | group
        super().add_param_group(group)


def _preset(name: str) -> dict[str, Any]:
    return PRESETS[choose("preset", name, PRESETS)]


class SPAM(ClippedAdam):
    """SPAM, for parameters of any real floating dtype on any device, whole or sharded.

    Args:
        params: parameters, groups, or named parameters, as for every `torch.optim.Optimizer`.
        lr: learning rate; a float or a 0-d tensor.
        betas: β1, β2 of Adam's moments.
        eps: ε of Adam's denominator; the authors' code: 1e-6.
        weight_decay: λ, decoupled.
        spike_threshold: θ; 5000.
        reset_interval: ΔT, steps between resets of the moments; 500. None for no resets.
        warmup_steps: steps of warm-up after each reset; 150.
        density: share of a matrix's elements that have moments and move, 1/n: one of n neighbors, drawn anew at each
            reset; parameters below two dimensions move whole. 1 for all.
        maximize: ascend.

    Raises:
        ValueError: an option out of range, or, in `step`, a sparse or complex gradient, or an unknown sharding.

    Examples:
        >>> optimizer = SPAM(model.parameters(), lr=1e-3, reset_interval=500)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        spike_threshold: float = 5000.0,
        reset_interval: int | None = 500,
        warmup_steps: int = 150,
        density: float = 1.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, element_clip="spike_clip", **options_among(locals()))


class LowBitAdamW(ClippedAdam):
    """AdamW, for parameters of any real floating dtype on any device, whole or sharded.

    With fp32 moments it differs from `torch.optim.AdamW` in three points: the moments of bf16 parameters are fp32; a
    step is skipped if a gradient holds a NaN, an Inf, or an element beyond 9e18, whose square does not fit fp32; and
    where a schedule changes β1 or β2, as `OneCycleLR` does, moments are corrected by the weights of their gradients.

    Args:
        params: parameters, groups, or named parameters, as for every `torch.optim.Optimizer`.
        lr: learning rate; a float or a 0-d tensor.
        betas: β1, β2 of the moments.
        eps: ε of the denominator.
        weight_decay: λ, decoupled.
        maximize: ascend.
        moments: ``"fp8"`` or ``"fp32"``, 2.06 or 8 bytes per parameter; parameters below two dimensions keep fp32.
        master_weights: ``"fp16"`` keeps a second, three bits longer copy of bfloat16 parameters, with one scale per
            tensor. Other code's writes into the parameters are then overwritten at the next step.

    Raises:
        ValueError: an option out of range, or, in `step`, a sparse or complex gradient, or an unknown sharding.

    Examples:
        >>> optimizer = LowBitAdamW(model.parameters(), lr=1e-3, moments="fp8")
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        moments: str = "fp8",
        master_weights: str | None = None,
    ) -> None:
        super().__init__(params, **options_among(locals()))


def weigh(batch: Batch, decay: float) -> Tensor | float:
    """Sets the weights of this step, in the mean of gradients and in the parameters; returns the learning rate."""
    group, rules, numbers = batch.group, batch.rules, batch.numbers
    taken, weight, mean_weight = numbers["taken"], numbers["weight"], numbers["mean_weight"]
    weight1, weights = growing_weight(1 - halving_decay(decay, numbers, rules.total_steps), mean_weight)
    numbers["mean_weight"] = torch.where(taken, weights, mean_weight)
    lr = group["lr"].to(weight, non_blocking=True) if isinstance(group["lr"], Tensor) else group["lr"]
    factor = torch.where(taken, numbers["factor"], batch.zero)  # not a square too large times 0
    numbers["factor"] = -factor if group["maximize"] else factor
    numbers["weight1"] = weight1 * weight  # 1 after a reset: the past is gone
    rate = lr * weight
    numbers["rate"] = rate * _warmth(numbers, rules.warmup_steps) if rules.warmup_steps else rate
    numbers["decay"] = rate * group["weight_decay"]
    return lr


def _update(batch: Batch) -> None:
    """Applies Adam to a batch: parameters, moments and master weights."""
    group, rules, numbers = batch.group, batch.rules, batch.numbers
    taken, weight, k = numbers["taken"], numbers["weight"], numbers["steps_since_reset"]
    lr = weigh(batch, group["betas"][0])
    numbers["weight2"] = step_weight(numbers, group["betas"][1], k)
    scales = [member.state["master_scale"] for member in batch.members] if rules.has_masters else []
    if scales:
        numbers["old_scale"] = torch.stack(scales)
        # A power of two that leaves room for the step: weights may be far smaller than that, which is at most seven
        # learning rates at the usual betas.
        exponent = frexp(numbers["weight_amax"] + 2 * lr)[1] - 14
        numbers["new_scale"] = power_of_two(exponent).to(weight.dtype)
    decision = batch.decision(group["eps"], decays=bool(group["weight_decay"]))
    batch.sums = batch.passes.update(decision, batch.sums_in_update)
    if scales:
        final = torch.where(taken, numbers["new_scale"], numbers["old_scale"]).float()
        foreach_copy_(scales, list(final.unbind()))
    numbers["steps_since_reset"] = k + taken  # only now: random bits depend on the last reset


def _warmth(numbers: Numbers, warmup_steps: int) -> Tensor:
    """Share of the learning rate [P]: after each reset a cosine from 0.01 to 1 over ``warmup_steps``."""
    weight, k = numbers["weight"], numbers["steps_since_reset"]
    rising = cosine(_WARMUP_FROM, 1.0, k, warmup_steps, weight.dtype)
    return torch.where(numbers["steps"] > k, rising, 1.0)  # the start is no reset
