"""The rules that clip spikes, and the options of all optimizers here: tables by name.

AdaClip and SpikeClip change elements, AdaGN norms of parameters, GradClip the norm of all parameters together.

Averages in the rules are exponential and moving. The state holds the bias-corrected T̂ = T/(1 − γᵗ) itself:

    T̂ₜ = T̂ₜ₋₁ + wₜ·(Mₜ − T̂ₜ₋₁),    wₜ = (1 − γ)/(1 − γᵗ) = 1 / (1 − γ/(1 − γ)·expm1((t − 1)·log γ))

This form is exact at t = 1, and accurate in fp32 at γ = .99999, where γ and 1 − γᵗ rounded to fp32 are wrong by 1e-3.

A rule decides one number per parameter: it reads and writes ``numbers``, tensors [P] by name (see
`lightning_lowbit.kernels.shards.Decision`). Nothing here waits for an accelerator.

Source: the Stable-SPAM thesis, chapter 3 and algorithm A.1; SpikeClip: its equation 2.1, and SPAM (arXiv 2501.06842),
section 3. As in the thesis, M enters the threshold to which it is compared, and AdaClip is proportional: a spike just
above T may end below its unclipped neighbors.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.checks import is_number
from lightning_lowbit.patterns import checked_patterns

Scalar = Tensor | float
Numbers = dict[str, Tensor]
ClipResult = tuple[Tensor, Tensor | None]  # elements, and a tensor that is 0 where they did not change; None: nowhere

_spike_clip_after = 20  # SpikeClip waits until so many gradients are in the second moment

_NEVER_ZERO = "it keeps 0/0 away, 1e-8 is usual"


# --- options ---


class Option(NamedTuple):
    """An option of a parameter group: its default, its check, and the words of its error."""

    default: Any
    is_valid: Callable[[Any], bool]
    needed: str
    advice: str


def _is_decay(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63


def _is_finite(value: Any) -> bool:
    largest = 2**63 - 1 if isinstance(value, int) else sys.float_info.max  # torch takes integers of 64 bits
    return is_number(value) and abs(value) <= largest


def _is_rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return _is_finite(value) and value >= 0


def _one_of(*names: str | None, default: str | None) -> Option:
    words = ", ".join("None" if name is None else repr(name) for name in names)
    return Option(default, lambda value: value in names, f"one of {words}", "names are case-sensitive")


def _flag(advice: str, default: bool = False) -> Option:
    return Option(default, lambda value: isinstance(value, bool), "True or False", advice)


def _positive(default: float, advice: str) -> Option:
    return Option(default, lambda value: _is_finite(value) and value > 0, "a finite number > 0", advice)


def _decay(default: float) -> Option:
    return Option(default, _is_decay, "a number in [0, 1)", "it is the decay of an average, such as 0.9")


def _patterns(advice: str) -> Option:
    def are_patterns(value: Any) -> bool:
        try:
            checked_patterns("", [] if value is None else value)
        except ValueError:
            return False
        return True

    return Option(None, are_patterns, "a list of regular expressions for names, or None", advice)


def _count_or_none(advice: str) -> Option:
    return Option(None, lambda value: value is None or _is_count(value), "an integer >= 1, or None", advice)


def options_among(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in OPTIONS if name in arguments}


def check_options(owner: str, options: Mapping[str, Any]) -> None:
    """Raises a ``ValueError`` that names the first option with a wrong value."""
    for name, (_, is_valid, needed, advice) in OPTIONS.items():
        if name in options and not is_valid(options[name]):
            raise ValueError(f"{owner} needs {name} to be {needed}, got {options[name]!r}; {advice}.")


# --- averages ---


def averaging_weight(decay: float, steps_before: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the newest value's weight in a bias-corrected average, (1 − γ)/(1 − γᵗ) with t = steps_before + 1.

    With no step before, it is exactly 1 and nothing older survives, which is also how moments are reset.
    """
    log_decay = math.log(decay) if decay > 0 else -1e30  # γ = 0: expm1 gives 0 or -1, times γ = 0
    return (1 - decay / (1 - decay) * torch.expm1(steps_before.to(dtype) * log_decay)).reciprocal()


def step_weight(numbers: Numbers, decay: float, steps_before: Tensor) -> Tensor:
    """Returns the `averaging_weight` of this step, [P]; 0 where it is skipped."""
    return numbers["weight"] * averaging_weight(decay, steps_before, numbers["weight"].dtype)


def growing_weight(new: Scalar, total: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the newest value's weight (1 − γₜ)/(1 − γ₁·γ₂·…·γₜ) in an average, whose γ may change, and the new total.

    ``new`` is 1 − γₜ, in (0, 1]. ``total`` is 1 − γ₁·…·γₜ₋₁, 0 at the first step and after a reset; any shape. In fp32
    the error of both results is about 6e-8/(1 − γ).
    """
    total = torch.lerp(total, torch.ones_like(total), new)
    return new / total, total


def cosine(start: float, end: float, steps: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Falls or rises from ``start`` to ``end`` along half a cosine over ``length`` steps; the shape of ``steps``."""
    progress = (steps.to(dtype) / length).clamp(max=1.0)
    return end + (start - end) * (1 + torch.cos(math.pi * progress)) / 2


def halving_decay(decay: float, numbers: Numbers, total_steps: int | None) -> Scalar:
    """γ1 or β1 in this step: it halves along a cosine over ``total_steps``, [P]; the decay itself without these."""
    if total_steps is None:
        return decay
    return decay * cosine(1.0, 0.5, numbers["steps"] + 1, total_steps, numbers["weight"].dtype)


def largest_root(dtype: torch.dtype, summed: int = 1) -> float:
    """Returns a number of which ``summed`` squares fit with a factor of four to spare: 9e18 for one in fp32."""
    return float((torch.finfo(dtype).max / summed) ** 0.5 / 2)


def norm_of(norms: Tensor) -> Tensor:
    """√Σn², 0-d, of norms whose squares need not fit the dtype."""
    largest = norms.max().clamp(min=torch.finfo(norms.dtype).tiny)
    return largest * (norms / largest).square().sum().sqrt()


# --- rules for elements ---


@contextmanager
def spikes_clipped_after(steps: int) -> Iterator[None]:
    """Lets SpikeClip wait for so many steps within this context, before the first one and after each reset."""
    global _spike_clip_after
    previous, _spike_clip_after = _spike_clip_after, steps
    try:
        yield
    finally:
        _spike_clip_after = previous


@dataclass(frozen=True)
class ElementRule:
    """Leaves elements as they are; the interface of the rules for elements."""

    name: ClassVar[str | None] = None
    needs_mean_square: ClassVar[bool] = False  # SpikeClip compares elements with the second moment

    def decide(self, amax: Tensor, numbers: Numbers) -> Tensor:
        """Sets ``limit`` and ``ratio``; returns max|g| after the rule. ``amax`` is max|g|, 0 in a skipped step; [P]."""
        numbers["limit"], numbers["ratio"] = torch.full_like(amax, torch.inf), torch.ones_like(amax)
        return amax

    @staticmethod
    def clip(gradient: Tensor, limit: Scalar, ratio: Scalar, mean_square: Tensor | None) -> ClipResult:
        """Clips elements into a new tensor; ``limit`` and ``ratio`` are 0-d, ``mean_square`` is SpikeClip's v."""
        return gradient, None


@dataclass(frozen=True)
class AdaClip(ElementRule):
    """M = max|g|;  T ← avg(M; γ3, t);  where |g| > T:  g ← g·T/M. ``limit`` is T, ``ratio`` T/M."""

    name: ClassVar[str | None] = "ada_clip"
    gamma3: float

    def decide(self, amax: Tensor, numbers: Numbers) -> Tensor:
        threshold = numbers["threshold"].lerp_(amax, step_weight(numbers, self.gamma3, numbers["steps"]))
        numbers["limit"] = threshold
        numbers["ratio"] = (threshold / amax).masked_fill(amax <= threshold, 1.0)
        return torch.minimum(amax, threshold)

    @staticmethod
    def clip(gradient: Tensor, limit: Scalar, ratio: Scalar, mean_square: Tensor | None) -> ClipResult:
        spikes = gradient.abs() > limit
        return torch.where(spikes, gradient * ratio, gradient), spikes


@dataclass(frozen=True)
class SpikeClip(ElementRule):
    """g limited to ±√(θ·v), where v > 0. ``limit`` is the factor on v, and Inf for no clip.

    The paper's v has the bias of a moving average that begins with zeros. The factor on a bias-corrected v of decay
    ``beta2`` is θ·(1 − β2ᵏ). ``beta2`` is 0 for a v with that bias, and the factor θ.
    """

    name: ClassVar[str | None] = "spike_clip"
    needs_mean_square: ClassVar[bool] = True
    spike_threshold: float
    beta2: float

    def decide(self, amax: Tensor, numbers: Numbers) -> Tensor:
        k, weight = numbers.get("steps_since_reset", numbers["steps"]), numbers["weight"]
        share = -torch.expm1(k.to(weight.dtype) * math.log(self.beta2)) if self.beta2 else torch.ones_like(weight)
        numbers["limit"] = torch.where(k < _spike_clip_after, torch.inf, self.spike_threshold * share)
        numbers["ratio"] = torch.ones_like(amax)
        return amax

    @staticmethod
    def clip(gradient: Tensor, limit: Scalar, ratio: Scalar, mean_square: Tensor | None) -> ClipResult:
        if mean_square is None:
            return gradient, None
        mean_square = mean_square.to(gradient.dtype)
        bound = torch.where(mean_square > 0, mean_square * limit, math.inf).sqrt_()
        clipped = torch.minimum(torch.maximum(gradient, -bound), bound)
        return clipped, clipped - gradient


# --- rules for norms ---


@dataclass(frozen=True)
class NormRule:
    """Leaves norms as they are; the interface of the rules for norms."""

    name: ClassVar[str | None] = None

    def brings_below(self, limit: float) -> bool:
        """Returns whether the rule scales gradients of any size to elements below ``limit``."""
        return False

    def factor(self, numbers: Numbers, total: Tensor | None) -> Tensor:
        """Returns the factor on gradients, [P].

        Args:
            numbers: with ``norm``, that of a whole gradient after the rule for elements; ``norm_in_units``, the same in
                units of ``unit``, whose square fits.
            total: norm of all gradients under GradClip, 0-d; None where no parameter has this rule.
        """
        return torch.ones_like(numbers["weight"])


@dataclass(frozen=True)
class AdaGN(NormRule):
    """n = ‖g‖₂;  m ← avg(n; γ1, t);  v ← avg(n²; γ2, t);  g ← g/n · m/(√v + ε); a zero gradient stays zero.

    g is the gradient after the rule for elements. ε is ``norm_eps`` in `Adaptive`, and ``eps`` in an Adam. γ1 halves
    over ``total_steps``, unless these are None.
    """

    name: ClassVar[str | None] = "ada_gn"
    gamma1: float
    gamma2: float
    norm_eps: float
    total_steps: int | None

    def brings_below(self, limit: float) -> bool:
        return True

    def factor(self, numbers: Numbers, total: Tensor | None) -> Tensor:
        taken, weight = numbers["taken"], numbers["weight"]
        gamma1 = halving_decay(self.gamma1, numbers, self.total_steps)
        new, weights = growing_weight(1 - gamma1, numbers["norm_mean_weight"])
        numbers["norm_mean_weight"] = torch.where(taken, weights, numbers["norm_mean_weight"])
        usual = numbers["norm"].clamp(max=largest_root(weight.dtype))  # a larger one counts as that: n² has to fit
        mean = numbers["norm_mean"].lerp_(usual, weight * new)
        mean_square = numbers["norm_mean_square"]
        mean_square.lerp_(usual.square(), step_weight(numbers, self.gamma2, numbers["steps"]))
        norm = numbers["norm_in_units"]
        ratio = torch.where(norm > 0, mean / (mean_square.sqrt() + self.norm_eps) / norm, 0.0)
        return (ratio / numbers["unit"]).clamp_(max=torch.finfo(weight.dtype).max)


@dataclass(frozen=True)
class GradClip(NormRule):
    """‖g‖₂ over all parameters with this rule is at most ``max_norm``."""

    name: ClassVar[str | None] = "grad_clip"
    max_norm: float

    def brings_below(self, limit: float) -> bool:
        return self.max_norm <= limit

    def factor(self, numbers: Numbers, total: Tensor | None) -> Tensor:
        assert total is not None
        bound = self.max_norm / (total.to(numbers["weight"].device) + 1e-6)
        return bound.clamp(max=1.0).expand_as(numbers["weight"])


#: The rules by the names that a group gives them.
ELEMENT_RULES: dict[str | None, type[ElementRule]] = {rule.name: rule for rule in (AdaClip, SpikeClip, ElementRule)}
NORM_RULES: dict[str | None, type[NormRule]] = {rule.name: rule for rule in (AdaGN, GradClip, NormRule)}

#: Options of Muon alone.
MUON = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "adam_names", "stack_names")

#: All options of this package's optimizers, by their key in a parameter group.
OPTIONS: dict[str, Option] = {
    "lr": Option(1e-3, _is_rate, "a finite number >= 0, or a real 0-d tensor", "1e-3 is usual"),
    "betas": Option(
        (0.9, 0.999),
        lambda value: isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_decay, value)),
        "two numbers in [0, 1)",
        "(0.9, 0.999) is usual",
    ),
    "eps": _positive(1e-8, _NEVER_ZERO),
    "weight_decay": Option(
        0.0, lambda value: _is_finite(value) and value >= 0, "a finite number >= 0", "pass 0 for none"
    ),
    "maximize": _flag("True ascends"),
    "norm_eps": _positive(1e-8, _NEVER_ZERO),
    "gamma1": _decay(0.7),
    "gamma2": _decay(0.9),
    "gamma3": _decay(0.999),
    "spike_threshold": _positive(5000.0, "SPAM's is 5000"),
    "max_norm": _positive(1.0, "1 is usual"),
    "element_clip": _one_of("ada_clip", "spike_clip", None, default=None),
    "norm_clip": _one_of("ada_gn", "grad_clip", None, default=None),
    "reset_interval": _count_or_none("None never resets the moments"),
    "warmup_steps": Option(
        0,
        lambda value: is_number(value) and (value == 0 or _is_count(value)),
        "an integer >= 0",
        "0 keeps the full rate after a reset",
    ),
    "total_steps": _count_or_none("it is the length of the run, and None keeps the decays as they are"),
    "matrices_only": _flag("True leaves biases and norms to plain Adam"),
    "moments": _one_of("fp32", "fp8", default="fp32"),
    "master_weights": _one_of("fp16", None, default=None),
    "density": Option(
        1.0,
        lambda value: is_number(value) and 1e-9 < value <= 1 and abs(round(1 / value) * value - 1) < 1e-6,
        "1 over an integer",
        "such as 1, 0.5 or 0.25",
    ),
    "momentum": _decay(0.95),
    "nesterov": _flag("False takes the averaged gradient alone", default=True),
    "ns_steps": Option(5, lambda value: _is_count(value) and value < 100, "an integer from 1 to 99", "5 is usual"),
    "adjust_lr_fn": _one_of("match_rms_adamw", "original", default="match_rms_adamw"),
    "adam_names": _patterns("[] gives Muon all matrices"),
    "stack_names": _patterns("[] gives Muon no parameters of three dimensions"),
}


class GroupRules(NamedTuple):
    """The rules of a group in one step, from its options.

    ``reset_interval``, ``warmup_steps`` and ``total_steps`` are the options of these names. So many squares of elements
    as ``squares_summed`` must fit the dtype together. With ``sums_in_update``, Adam's pass over the elements also sums
    squares and counts clipped elements, if no rule needs them earlier. With ``has_masters``, max|p| is measured for the
    scale of master weights.
    """

    elements: ElementRule = ElementRule()
    norms: NormRule = NormRule()
    reset_interval: int | None = None
    warmup_steps: int = 0
    total_steps: int | None = None
    squares_summed: int = 1
    sums_in_update: bool = True
    has_masters: bool = False

    def unguarded(self) -> "GroupRules":
        """Returns these without clipping and resets, for parameters below two dimensions under ``matrices_only``."""
        none: dict[str, Any] = {"elements": ElementRule(), "norms": NormRule(), "reset_interval": None}
        return self._replace(**none, warmup_steps=0, total_steps=None)


def rules_of(group: Mapping[str, Any], **more: Any) -> tuple[ElementRule, NormRule]:
    """Makes the rules that a group names, with its options; ``more`` are fields of rules that are no options."""
    values = {**group, **more}

    def build(rule: type[Any]) -> Any:
        return rule(*[values[name] for name in rule.__match_args__])

    return build(ELEMENT_RULES[group["element_clip"]]), build(NORM_RULES[group["norm_clip"]])
