"""Stable-SPAM: Adam that survives the spikes of low-bit training.

Each parameter tensor has its gradient g clipped (AdaClip) and rescaled (AdaGN) by its own history, and every ΔT steps
Adam's moments start anew (MoRet), so that a spike which got through is forgotten. t counts the steps taken, k those
since the last reset; two counters, because the clipping statistics must outlive the resets.

    weight decay  p ← p·(1 − lr·λ)                                     (decoupled)
    AdaClip       M = max|g|;  T ← avg(M; γ3, t);  where |g| > T:  g ← g·T/M
    AdaGN         n = ‖g‖₂;  m ← avg(n; γ1, t);  v ← avg(n²; γ2, t);   g ← g/n · m/(√v + ε)
    MoRet         when t mod ΔT = 0:  k ← 0, before g enters the moments
    Adam          k ← k + 1;  μ ← avg(g; β1, k);  ν ← avg(g²; β2, k);  p ← p − lr·μ/(√ν + ε)

avg(x; γ, t) is the bias-corrected moving average of `clipping`: x̂ ← x̂ + w·(x − x̂), w = (1 − γ)/(1 − γᵗ). Three things
come with this form. The state holds the estimates themselves: ``mean`` is what textbooks write m̂ = m/(1 − β1ᵏ). A reset
is k = 0, where w = 1. And a step with a NaN or Inf anywhere is one in which every w, lr and count is multiplied by 0:
it is skipped whole, without asking the device, and so without a host sync.

Two passes over the gradients measure (maxima, then sums of squares after the clip), a third updates. All work in
pieces that fit a cache, so that the extra memory is a few MB; ``p.grad`` is never written.

Source: the Stable-SPAM thesis, chapter 3 and algorithm A.1. ε stands outside the roots, as in the authors' code;
their single counter, which inflates the clipping threshold after each reset, is not followed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_lowbit.optim import clipping


class StableSPAM(torch.optim.Optimizer):
    """Stable-SPAM for whole (unsharded) parameters of any real floating dtype on any device.

    Every hyper-parameter is an option of the parameter group and read at each step. Clip gradients nowhere else
    (``Trainer(gradient_clip_val=None)``): the rules want to see them as they are.

    State of a parameter, all on its device; statistics are fp32 (float64 for float64 parameters): ``steps`` t and
    ``steps_since_reset`` k (int64, 0-d); ``threshold`` T, ``norm_mean`` m and ``norm_mean_square`` v (0-d); ``mean`` μ
    and ``mean_square`` ν (the parameter's shape). All averages are bias-corrected.

    BF16 training: ``StableSPAM(model.parameters(), lr=1e-3, **StableSPAM.bf16_defaults)``.

    Args:
        params: parameters, groups, or named parameters, as for every `torch.optim.Optimizer`.
        lr: learning rate; a float or a 0-d tensor. Table A.2: 1e-3 for LLaMA-130M, 4e-4 for 350M, 2e-4 for 1B.
        betas: β1, β2 of Adam's moments; algorithm A.1: .9, .999.
        eps: ε, in the norm's and in Adam's denominator; the authors' code: 1e-8.
        weight_decay: λ, decoupled; the authors' configurations: 0.
        gamma1: γ1, average of the gradient norm; table A.2: .7 for 4 bits, table A.3: .85 for BF16.
        gamma2: γ2, average of its square; table A.2: .9 for 4 bits, table A.3: .99999 for BF16.
        gamma3: γ3 (θ in places), average of the largest element; tables A.2 and A.3: .999.
        reset_interval: ΔT, steps between resets of the moments; tables A.2 and A.3: 1000 (authors' 4-bit scripts: 500).

    Raises:
        ValueError: a hyper-parameter out of range, or, in `step`, a sparse or complex gradient.
    """

    #: What table A.3 has for BF16 training. In YAML, write the two numbers under ``init_args``.
    bf16_defaults: ClassVar[MappingProxyType[str, Any]] = MappingProxyType({"gamma1": 0.85, "gamma2": 0.99999})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        gamma1: float = 0.7,
        gamma2: float = 0.9,
        gamma3: float = 0.999,
        reset_interval: int = 1000,
    ) -> None:
        adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        stable = {"gamma1": gamma1, "gamma2": gamma2, "gamma3": gamma3, "reset_interval": reset_interval}
        super().__init__(params, adam | stable)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also in mid-training; an option out of range is a ValueError."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy. The base class would cast the statistics and counters of a bf16 parameter to bf16."""
        final: dict[str, Any] = {}  # as the user's own pre-hooks leave it: this hook is the last to be registered
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: final.update(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        saved = chain.from_iterable(group["params"] for group in final["param_groups"])
        current = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(saved, current, strict=True):
            for name, value in final["state"].get(index, {}).items():
                dtype = _statistics_dtype(parameter) if value.is_floating_point() else value.dtype
                self.state[parameter][name] = value.to(parameter.device, dtype, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step, or none if any gradient of any group holds a NaN or Inf.

        ``closure`` evaluates the model; it runs first, with gradients enabled, and its loss is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        batches = self._batches()
        if batches:
            maxima = [batch.maxima() for batch in batches]
            finite = torch.stack([maximum.isfinite().all().to(maxima[0].device) for maximum in maxima]).all()
            squares = [batch.clip(finite.to(m.device), m) for batch, m in zip(batches, maxima, strict=True)]
            for batch, square in zip(batches, squares, strict=True):
                batch.update(square)
        return loss

    def _batches(self) -> list["_Batch"]:
        batches: list[_Batch] = []
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], _Batch] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _check_gradient(parameter.grad)
                    dtype = _statistics_dtype(parameter)
                    batch = alike.setdefault((parameter.device, dtype), _Batch(group, dtype))
                    batch.parameters.append(parameter)
                    batch.gradients.append(parameter.grad)
                    batch.states.append(self.state[parameter] or self._new_state(parameter, dtype))
            batches.extend(alike.values())
        return batches

    def _new_state(self, parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        zero = torch.zeros((), dtype=dtype, device=parameter.device)
        state.update({name: zero.long() if "steps" in name else zero.clone() for name in _Batch.SCALARS})
        state.update({name: torch.zeros_like(parameter, dtype=dtype) for name in ("mean", "mean_square")})
        return state


@dataclass
class _Batch:
    """P parameters of one group, device and dtype of the statistics, in one step; the statistics are tensors [P]."""

    SCALARS: ClassVar = ("steps", "steps_since_reset", "threshold", "norm_mean", "norm_mean_square")

    group: dict[str, Any]
    dtype: torch.dtype
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)

    def maxima(self) -> Tensor:
        """M [P]; NaN or Inf where the gradient holds one."""
        return torch.stack([clipping.absolute_maximum(gradient).to(self.dtype) for gradient in self.gradients])

    def clip(self, finite: Tensor, maximum: Tensor) -> Tensor:
        """AdaClip: update T; return Σg² after it [P], in units of `unit`². ``finite``, 0-d bool, is False to skip."""
        self.finite, self.taken = finite, finite.to(self.dtype)
        scalars = (torch.stack([state[name] for state in self.states]) for name in self.SCALARS)
        self.t, self.k, self.threshold, self.norm_mean, self.norm_mean_square = scalars
        maximum = torch.where(finite, maximum, 0.0)
        self.threshold.lerp_(maximum, self._weight(self.group["gamma3"], self.t))
        self.ratio = clipping.clip_ratio(maximum, self.threshold)
        # The largest element after the clip. Measured in it, no square overflows.
        self.unit = torch.minimum(maximum, self.threshold).clamp_(min=torch.finfo(self.dtype).tiny)
        measured = zip(self.gradients, self.threshold, self.ratio, self.unit.reciprocal(), strict=True)
        return torch.stack([clipping.sum_of_squares(*arguments) for arguments in measured])

    def update(self, squares: Tensor) -> None:
        """AdaGN, MoRet and Adam, and all state."""
        group = self.group
        norm_in_units = torch.where(self.finite, squares, 0.0).sqrt_()
        largest = torch.finfo(self.dtype).max ** 0.5 / 2  # 9e18 in fp32; a norm above counts as that, n² has to fit
        norm = (norm_in_units * self.unit).clamp_(max=largest)
        self.norm_mean.lerp_(norm, self._weight(group["gamma1"], self.t))
        self.norm_mean_square.lerp_(norm.square(), self._weight(group["gamma2"], self.t))
        scale = clipping.norm_ratio(norm_in_units, self.norm_mean, self.norm_mean_square, group["eps"]) / self.unit

        self.t += self.finite
        reset = self.finite & (self.t % group["reset_interval"] == 0)
        self.k = torch.where(reset, 0, self.k)
        weight1, weight2 = (self._weight(beta, self.k) for beta in group["betas"])  # 1 after a reset: the past is gone
        self.k += self.finite

        lr = group["lr"].to(self.taken, non_blocking=True) if isinstance(group["lr"], Tensor) else group["lr"]
        lr = lr * self.taken
        decay = 1 - lr * group["weight_decay"] if group["weight_decay"] else None
        per_parameter = zip(self.threshold, self.ratio, scale, weight1, weight2, strict=True)
        tensors = zip(self.parameters, self.gradients, self.states, per_parameter, strict=True)
        for whole, gradient, state, scalars in tensors:
            for p, g, mean, mean_square in clipping.pieces(whole, gradient, state["mean"], state["mean_square"]):
                _adam_(p, g, mean, mean_square, *scalars, lr, decay, group["eps"])
        statistics = (self.t, self.k, self.threshold, self.norm_mean, self.norm_mean_square)
        for name, values in zip(self.SCALARS, statistics, strict=True):
            torch._foreach_copy_([state[name] for state in self.states], list(values.unbind()))

    def _weight(self, decay: float, steps_before: Tensor) -> Tensor:
        return self.taken * clipping.averaging_weight(decay, steps_before, self.dtype)


# fmt: off
def _adam_(
    parameter: Tensor, gradient: Tensor, mean: Tensor, mean_square: Tensor,              # any one shape
    threshold: Tensor, ratio: Tensor, scale: Tensor, weight1: Tensor, weight2: Tensor,   # 0-d, and so are lr and decay
    lr: Tensor, decay: Tensor | None, eps: float,
) -> None:  # fmt: on
    """Clip, scale and apply one piece of a gradient, in place; with weights and lr of 0 nothing moves, NaN or not."""
    update = clipping.ada_gn_(clipping.ada_clip(gradient, threshold, ratio), scale)
    update.nan_to_num_(0.0, 0.0, 0.0)  # a skipped step, as 0·NaN is NaN; or a g below 1e-38 scaled up beyond fp32
    mean.lerp_(update, weight1)
    mean_square.lerp_(update.square_(), weight2)
    direction = mean / torch.sqrt(mean_square, out=update).add_(eps)
    master = parameter.to(mean.dtype)  # the parameter itself, unless it is in low precision
    if decay is not None:
        master.mul_(decay)
    parameter.copy_(master.addcmul_(direction, lr, value=-1))


def _statistics_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _check_gradient(gradient: Tensor) -> None:
    if gradient.layout == torch.strided and not gradient.is_complex():
        return
    raise ValueError(
        f"StableSPAM needs dense, real gradients, got {gradient.layout}, {gradient.dtype}, {tuple(gradient.shape)}. "
        "Sparse: build the layer with sparse=False or give this parameter to torch.optim.SparseAdam. "
        "Complex: keep the parameter as real numbers and use torch.view_as_complex in the forward."
    )


# What each option has to be: as a test, in words, and advice.
_DECAY = (lambda decay: 0 <= decay < 1, "a number in [0, 1)", "it is the decay of an average, such as 0.9")
_OPTIONS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "lr": (lambda lr: isinstance(lr, Tensor) or 0 <= lr < math.inf, "a finite number >= 0", "1e-3 is usual"),
    "betas": (lambda b: len(b) == 2 and all(0 <= x < 1 for x in b), "two numbers in [0, 1)", "(0.9, 0.999) is usual"),
    "eps": (lambda eps: 0 < eps < math.inf, "a finite number > 0", "it keeps 0/0 away, 1e-8 is usual"),
    "weight_decay": (lambda decay: 0 <= decay < math.inf, "a finite number >= 0", "pass 0 for none"),
    **dict.fromkeys(("gamma1", "gamma2", "gamma3"), _DECAY),
    "reset_interval": (lambda n: isinstance(n, int) and n > 0, "an integer >= 1", "a very large one is never reached"),
}


def _check_options(options: dict[str, Any]) -> None:
    for name, (is_valid, needed, advice) in _OPTIONS.items():
        if not is_valid(options[name]):
            raise ValueError(f"StableSPAM needs {name} to be {needed}, got {options[name]!r}; {advice}.")
