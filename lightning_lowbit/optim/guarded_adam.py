"""Adam behind guards: the one engine of StableSPAM, SPAM and LowBitAdamW, which differ in their options only.

Each parameter tensor has its gradient g guarded by its own history (`guards`), and every ΔT steps Adam's moments start
anew (MoRet), so that a spike which got through is forgotten. t counts the steps taken, k those since the last reset;
two counters, because the statistics of the guards must outlive the resets.

    MoRet         when t mod ΔT = 0:  k ← 0, before g enters the moments
    weight decay  p ← p·(1 − lr·λ)                                     (decoupled)
    guards        g ← factor·clip(g)
    Adam          k ← k + 1;  μ ← avg(g; β1, k);  ν ← avg(g²; β2, k);  p ← p − lr·μ/(√ν + ε)

avg(x; γ, t) is the bias-corrected moving average of `clipping`: x̂ ← x̂ + w·(x − x̂), w = (1 − γ)/(1 − γᵗ). Three things
come with this form. The state holds the estimates themselves: ``mean`` is what textbooks write m̂ = m/(1 − β1ᵏ). A reset
is k = 0, where w = 1. And a step with a NaN or Inf anywhere is one in which every w, lr and count is multiplied by 0:
it is skipped whole, without asking the device, and so without a host sync.

After the two passes of `guards` that measure, a third updates. All work in pieces that fit a cache, so that the extra
memory is a few MB; ``p.grad`` is never written. On a CPU, where scalars are Python's numbers, torch's fused kernel does
Adam's part: with β = 1 − w and a bias correction of 1 it is the same rule.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_lowbit.distributed import local, offsets_of
from lightning_lowbit.optim import clipping
from lightning_lowbit.optim.adam import adam_, fused_adam_
from lightning_lowbit.optim.clipping import Scalar
from lightning_lowbit.optim.guarded_optimizer import GuardedOptimizer, Seen
from lightning_lowbit.optim.guards import Guards
from lightning_lowbit.optim.moments import DenseMoments, Draw, FP8Moments, Piece, moments_of
from lightning_lowbit.optim.options import check_options

# Share of the learning rate just after a reset, where a warm-up follows (SPAM's "death rate" is .99).
_WARMUP_FROM = 0.01

# Decays end at this share of themselves, where `total_steps` lets them fall.
_DECAY_TO = 0.5


class _Dtypes(NamedTuple):
    """What an option's value needs of parameters, and advice."""

    value: str
    of: set[torch.dtype]
    advice: str


_LOW = {torch.bfloat16, torch.float16}
_DTYPES = {
    "master_weights": _Dtypes("fp16", _LOW, "leave it out, or convert the model with .to(torch.bfloat16)"),
    "moments": _Dtypes("fp8", {*_LOW, torch.float32}, "float64 is asked for where digits count, so use moments='fp32'"),
}


# All that a state may hold besides scalars.
_KEPT = {*FP8Moments.names, "master"}


class GuardedAdam(GuardedOptimizer):
    """Adam with all options of this package, for parameters of any real floating dtype, whole or sharded.

    Every option is one of the parameter group and read at each step. Clip gradients nowhere else
    (``Trainer(gradient_clip_val=None)``): the guards want to see them as they are.

    State of a parameter, all on its device; statistics are fp32 (float64 for float64 parameters): ``steps`` t and
    ``steps_since_reset`` k (int64, 0-d); ``threshold``, ``norm_mean``, ``norm_mean_square`` (0-d);
    ``norm_mean_weight``, ``mean_weight`` (0-d), the total weight in an average; ``mean`` μ and ``mean_square`` ν (the
    parameter's shape, see `moments`). All averages are bias-corrected.

    Args:
        params: parameters, groups, or named parameters, as for every `torch.optim.Optimizer`.
        options: see `options.OPTIONS`; all that `DEFAULTS` has.

    Raises:
        ValueError: an option out of range; or, in `step`, a sparse or complex gradient, or a parameter whose
            sharding is not known.
    """

    #: The values that options have where a subclass says nothing.
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
        """Add a group, also in mid-training; an option out of range is a ValueError."""
        check_options(type(self).__name__, options := {**self.defaults, **param_group})
        alone = {"moments": "fp32", "norm_clip": None, "master_weights": None}
        given = {name: options[name] for name in alone}
        if options["density"] < 1 and given != alone:
            raise ValueError(
                f"{type(self).__name__} keeps sparse moments (density={options['density']}) in fp32, without a rule "
                f"for norms and without master_weights; got {given}."
            )
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

    @torch.no_grad()
    def reset_moments(self) -> None:
        """Starts Adam's moments anew, as MoRet does, of all parameters; statistics and master weights stay."""
        for state in self.state.values():
            for name in ("steps_since_reset", "mean_weight"):  # the rest of a moment has no weight in the next one
                if name in state:
                    state[name].zero_()

    def _apply(self, batches: Sequence[Guards], factors: Sequence[Tensor]) -> None:
        for batch, factor in zip(batches, factors, strict=True):
            assert isinstance(batch, _AdamBatch)
            batch.update(factor)

    def _new_batch(self, *args: Any) -> Guards:
        return _AdamBatch(*args)

    def _add(self, batch: Guards, seen: Seen, group: Mapping[str, Any]) -> None:
        assert isinstance(batch, _AdamBatch)
        format = moments_of(group["moments"], group["density"], len(seen.sharding.shape))
        if seen.sharding.is_flat and format.draws:
            raise ValueError(
                "Under FSDP1 a rank holds a stretch of a matrix and no rows: FP8 and sparse moments need "
                "ModelParallelStrategy (FSDP2), DDP, or FSDP1 with sharding_strategy='NO_SHARD'. "
                "Or pass moments='fp32' and density=1."
            )
        parameter, master = seen.parameter, group["master_weights"]
        state = self.state[parameter] or self._new_state(parameter, format, batch.dtype, master)
        kept, wanted = _KEPT & set(state), {*format.names, *({"master"} if master else ())}
        if kept != wanted:
            raise ValueError(
                f"Of a parameter of {tuple(parameter.shape)} {', '.join(sorted(kept))} are kept, and not "
                f"{', '.join(sorted(wanted))}: moments and master_weights cannot be changed in mid-training; build a "
                "new optimizer."
            )
        batch.add(parameter, seen.part, seen.gradient, state)
        batch.add_adam(seen.part, format, seen.number)

    def _new_state(
        self, parameter: Tensor, format: DenseMoments, dtype: torch.dtype, master: str | None
    ) -> dict[str, Tensor]:
        made = _AdamBatch.new_scalars(local(parameter).device, dtype) | format.new_state(parameter, dtype)
        if master is not None:
            made["master"] = torch.zeros_like(parameter, dtype=torch.float16)
            made["master_scale"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
        state: dict[str, Tensor] = self.state[parameter]
        state.update(made)
        return state


class _AdamBatch(Guards):
    """Guards, and the Adam behind them."""

    SCALARS: ClassVar[tuple[str, ...]] = (*Guards.SCALARS, "steps_since_reset", "mean_weight")

    steps_since_reset: Tensor
    mean_weight: Tensor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parts: list[Tensor] = []
        self.formats: list[DenseMoments] = []
        self.numbers: list[int] = []  # of each parameter in the optimizer

    def add_adam(self, part: Tensor, format: DenseMoments, number: int) -> None:
        """Adds what Adam has to know of a parameter."""
        self.parts.append(part)
        self.formats.append(format)
        self.numbers.append(number)

    @property
    def norm_eps(self) -> float:
        """One ε for both denominators."""
        return float(self.options["eps"])

    def forget_gradients(self) -> None:
        """Lets go of the parameters' parts, too."""
        super().forget_gradients()
        self.parts, self.formats = [], []

    def begin(self) -> None:
        """MoRet."""
        interval = self.options["reset_interval"]
        if interval is not None:
            reset = self.taken & ((self.steps + 1) % interval == 0)
            self.steps_since_reset = torch.where(reset, 0, self.steps_since_reset)
            self.mean_weight = torch.where(reset, 0.0, self.mean_weight)

    @property
    def gradients_averaged(self) -> Tensor:
        """Those since the last reset."""
        return self.steps_since_reset

    def second_moment_weight(self) -> Tensor:
        """1 − β2ᵏ: ν is corrected for its bias."""
        beta2 = self.options["betas"][1]
        if not beta2:
            return super().second_moment_weight()
        return -torch.expm1(self.steps_since_reset.to(self.dtype) * math.log(beta2))

    def decay_factor(self) -> Tensor | float:
        """A cosine from 1 to a half over `total_steps`, and the half from there on."""
        if self.options["total_steps"] is None:
            return 1.0
        return self._along_cosine(1.0, _DECAY_TO, self.steps + 1, self.options["total_steps"])

    def _along_cosine(self, start: float, end: float, steps: Tensor, of: int) -> Tensor:
        progress = (steps.to(self.dtype) / of).clamp(max=1.0)
        return end + (start - end) * (1 + torch.cos(math.pi * progress)) / 2

    def measured_pieces(self, index: int, gradient: Tensor) -> Any:
        """Pieces of a gradient, each with ν of SpikeClip or None."""
        if self.options["element_clip"] != "spike_clip":
            return super().measured_pieces(index, gradient)
        return (
            (format.select(g, piece), format.load(piece)[1])
            for g, piece in self._pieces(index, gradient)
            for format in (self.formats[index],)
        )

    def maxima(self) -> Tensor:
        """max|g| and, where masters need a scale, max|p|."""
        rows = super().maxima()
        if self.options["master_weights"] is None:
            return rows
        weights = [clipping.absolute_maximum(part).to(self.dtype) for part in self.parts]
        return torch.cat([rows, torch.stack(weights).unsqueeze(0)])

    def read(self, maxima: Tensor, finite: Tensor) -> None:
        """Takes the maxima of the whole tensors; masters get a power of two that leaves them room for the step."""
        super().read(maxima, finite)
        if self.options["master_weights"] is not None:
            # Weights may be far smaller than a step; Adam's is at most seven learning rates at the usual betas.
            exponent = torch.frexp(maxima[1] + 2 * self._learning_rate()).exponent - 14
            self.master_scales = torch.ldexp(torch.ones_like(self.weight), exponent)

    def _pieces(self, index: int, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Pieces of tensors of a parameter's shape, each with what is kept for these rows."""
        format, state = self.formats[index], self.states[index]
        draw = self._draw(index) if format.draws else None
        row = 0
        for piece in clipping.pieces(*tensors, *(local(state[name]) for name in format.names)):
            views = dict(zip(format.names, piece[len(tensors) :], strict=True))
            yield (*piece[: len(tensors)], Piece(views, draw and draw.at(row)))
            row += len(piece[0])

    def _draw(self, index: int) -> Draw:
        whole, steps = self.parameters[index], self.steps[index]
        own = self.numbers[index] << 40  # what is drawn for a parameter is its own
        last_reset = steps - self.steps_since_reset[index]
        return Draw(offsets_of(whole), whole.shape, steps + own, last_reset + own, self.taken[index])

    def update(self, factor: Tensor) -> None:
        """Adam, and all state. ``factor``: what gradients are multiplied with after the clip, [P]."""
        options, k = self.options, self.steps_since_reset
        weight1, total = clipping.growing_weight(1 - options["betas"][0] * self.decay_factor(), self.mean_weight)
        self.mean_weight = torch.where(self.taken, total, self.mean_weight)
        weight2 = self._averaging(options["betas"][1], k)  # both are 1 after a reset: the past is gone
        lr = self._learning_rate() * self.weight
        factor = torch.where(self.taken, factor, 0.0)  # a square that does not fit, times a weight of 0, is NaN
        columns = (-factor if options["maximize"] else factor, weight1 * self.weight, weight2, lr * self._warmth())
        per_parameter = zip(*(self.scalars(column) for column in (*columns, lr * options["weight_decay"])), strict=True)
        skipped = [not taken for taken in self.scalars(self.taken)] if self.on_host else [False] * len(self.parts)
        for index, scalars in enumerate(per_parameter):
            if not skipped[index]:
                self._update_one(index, *scalars)
        if options["master_weights"] is not None:
            scales = torch.where(self.taken, self.master_scales, torch.stack([s["master_scale"] for s in self.states]))
            torch._foreach_copy_([state["master_scale"] for state in self.states], list(scales.float().unbind()))
        self.steps_since_reset = k + self.taken  # only now: `_draw` tells the last reset by it
        self.finish()

    def _update_one(self, index: int, factor: Any, weight1: Any, weight2: Any, rate: Any, decay: Any) -> None:
        options, format, state = self.options, self.formats[index], self.states[index]
        masters = [local(state["master"])] if options["master_weights"] is not None else []
        for number, (p, g, *master, piece) in enumerate(
            self._pieces(index, self.parts[index], self.gradients[index], *masters)
        ):
            gradient, (mean, mean_square) = format.select(g, piece), format.load(piece)
            update = self.adapted(gradient, index, number, factor, mean_square)
            if format.is_sparse and options["weight_decay"]:
                p.mul_(1 - decay)  # all elements, also those that have no moments
            weights = format.select(p, piece)
            if master:
                weights = self._unscaled(index, master[0], weights)
            work = weights.to(self.dtype)
            can_fuse = self.on_host and all(tensor.is_contiguous() for tensor in (work, mean, mean_square))
            decays = options["weight_decay"] and not format.is_sparse
            rule = fused_adam_ if can_fuse else adam_
            rule(work, update, mean, mean_square, weight1, weight2, rate, decay if decays else 0.0, options["eps"])
            if master:
                work = self._keep(index, master[0], work)
            format.restore(p, work, piece)
            format.store(piece, mean, mean_square)

    def _unscaled(self, index: int, master: Tensor, weights: Tensor) -> Tensor:
        scale = self.states[index]["master_scale"]  # 0 before the first step
        return torch.where(scale > 0, master.to(self.dtype) * scale, weights.to(self.dtype))

    def _keep(self, index: int, master: Tensor, work: Tensor) -> Tensor:
        """Rounds the weights to masters, of which parameters are roundings: a step not taken leaves both alone."""
        largest, scale, taken = torch.finfo(torch.float16).max, self.master_scales[index], self.taken[index]
        scaled = (work / scale).clamp_(-largest, largest).to(torch.float16)
        master.copy_(torch.where(taken, scaled, master))
        return torch.where(taken, scaled.to(self.dtype) * scale, work)

    def _learning_rate(self) -> Scalar:
        lr = self.options["lr"]
        if self.on_host:
            return float(lr)
        return lr.to(self.weight, non_blocking=True) if isinstance(lr, Tensor) else lr

    def _warmth(self) -> Tensor:
        """Share of the learning rate [P]: after each reset a cosine from a hundredth to all over `warmup_steps`."""
        steps = self.options["warmup_steps"]
        if not steps:
            return torch.ones_like(self.weight)
        rising = self._along_cosine(_WARMUP_FROM, 1.0, self.steps_since_reset, steps)
        return torch.where(self.steps > self.steps_since_reset, rising, 1.0)  # the start is no reset
