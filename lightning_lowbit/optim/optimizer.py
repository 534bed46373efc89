"""The step of all optimizers here: measure gradients, clip them by the rules of their group, apply them.

    measure     max|g| of each parameter                              one MAX over the ranks that hold shards of it
    clip        elements: AdaClip or SpikeClip
                Σg² after that, and how many elements changed         one SUM over these ranks
                norms: AdaGN or GradClip
    apply       the update that a subclass defines

Statistics describe whole (unsharded) gradients and are known before the update. Exception: without a rule for norms
nothing needs the sums early, so Adam's update computes them and they are reduced afterwards.

A step is skipped if max|g| is NaN or Inf, or if an element's square does not fit (9e18 in fp32), unless a rule for
norms scales it down: every weight of an average and every count is then multiplied by 0, on the device. A parameter
without a gradient on any rank has max|g| = −1, and does not take the step.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_lowbit.distributed import Sharding, all_reduce_, local, local_gradient, sharding_of
from lightning_lowbit.kernels.memory import described
from lightning_lowbit.optim.checked import CheckedOptimizer
from lightning_lowbit.optim.kernels import passes_for
from lightning_lowbit.optim.moments import DenseMoments, statistics_dtype
from lightning_lowbit.optim.passes import Batch, Member, scalar_dtype
from lightning_lowbit.optim.rules import GradClip, GroupRules, check_options, largest_root, norm_of

# Options that are names, checked in each step: a name misspelled in mid-training would silently switch its rule off.
_NAMES = ("element_clip", "norm_clip", "moments", "master_weights", "adjust_lr_fn")

# Squares of gradients within these need no unit to fit fp32; neither does the sum of 2^40 of them.
_SMALL, _LARGE = 1e-12, 1e12


class GradientStatistics(NamedTuple):
    """Measurements of the last step on one parameter's whole gradient; 0-d tensors on its device.

    Attributes:
        maximum: max|g| before any rule; Inf if it made the step skip, −1 if no rank has a gradient.
        threshold: T of AdaClip, which includes this maximum; 0 without that rule.
        clipped: number of elements changed by AdaClip or SpikeClip.
        norm, norm_after: ‖g‖₂ before and after AdaGN or GradClip, of clipped elements; NaN without any rule.
        steps_since_reset: number of gradients in the moments, including this one.
    """

    maximum: Tensor
    threshold: Tensor
    clipped: Tensor
    norm: Tensor
    norm_after: Tensor
    steps_since_reset: Tensor


class ClippedOptimizer(CheckedOptimizer):
    """An optimizer whose gradients are clipped by rules.

    A subclass defines the rules (`_rules`), the state of a parameter (`_member_state`) and the update (`_apply`).
    """

    _statistics: list[tuple[list[Tensor], list[Tensor | None]]]  # by batch: parameters, and columns [P]
    _memory: dict[int, Any]  # of passes, from step to step

    def _remember_parameters(self) -> None:
        super()._remember_parameters()
        self._statistics, self._memory = [], {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step, or none if a gradient of any group holds a NaN, an Inf, or an element that is too large.

        ``closure`` evaluates the model; it runs first, with gradients enabled, and its loss is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        batches = self._batches()
        if batches:
            _measure(batches)
            _clip_norms(batches)
            self._apply(batches)
            _set_norms([batch for batch in batches if batch.sums_in_update])
        # In place: an assignment to an optimizer's attribute is lost in a compiled step.
        self._statistics[:] = map(_statistics, batches)
        for batch in batches:
            del batch.passes  # which hold the batch: gradients would stay until Python collects cycles
        return loss

    @classmethod
    def new_scalars(cls, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: torch.zeros((), dtype=scalar_dtype(name, dtype), device=device) for name in cls.SCALARS}

    def gradient_statistics(self) -> dict[Tensor, GradientStatistics]:
        """Statistics of the last step by parameter, as tensors on its device: no host sync, no collective."""
        result: dict[Tensor, GradientStatistics] = {}
        for parameters, columns in self._statistics:
            nothing = torch.full_like(columns[0], torch.nan)  # type: ignore[arg-type]
            rows = zip(*(nothing if column is None else column for column in columns), strict=True)
            result.update((p, GradientStatistics(*row)) for p, row in zip(parameters, rows, strict=True))
        return result

    def _batches(self) -> list[Batch]:
        batches: list[Batch] = []
        number = -1
        for group in self.param_groups:
            check_options(type(self).__name__, {name: group[name] for name in _NAMES if name in self._options})
            rules = self._rules(group)
            alike: dict[Any, Batch] = {}
            for parameter in group["params"]:
                number += 1
                self._check_parameter(parameter)
                sharding, gradient, shard = sharding_of(parameter), local_gradient(parameter), local(parameter)
                if gradient is not None:
                    self._check_gradient(shard, gradient)
                elif not (sharding.groups and parameter.requires_grad):  # else another rank may have one
                    continue
                dtype = statistics_dtype(parameter)
                is_guarded = len(sharding.shape) > 1 or not group["matrices_only"]
                state, moments, tensors = self._member_state(parameter, group, sharding)
                key = (shard.device, dtype, sharding.groups, is_guarded, moments.has_mean_square)
                if key not in alike:
                    batch_rules = rules if is_guarded else rules.unguarded()
                    if not moments.has_mean_square:  # Adam's pass takes no part in the update
                        batch_rules = batch_rules._replace(sums_in_update=False)
                    alike[key] = Batch(group, batch_rules, shard.device, dtype, sharding.groups, self.SCALARS)
                alike[key].add(Member(parameter, number, shard, gradient, state, moments, tensors))
            batches.extend(alike.values())
        for batch in batches:
            batch.memory = self._memory
            batch.passes = passes_for(batch)
        if self._is_loaded:
            _share_scalars([batch for batch in batches if batch.groups])
            self._is_loaded = False
        return batches

    def _check_parameter(self, parameter: Tensor) -> None:
        if id(parameter) in self._known or isinstance(parameter, DTensor):
            return
        raise ValueError(
            f"{type(self).__name__} was given other parameters than it now has: one of {tuple(parameter.shape)} was "
            "put into a group from outside. DeepSpeed's ZeRO does so with flat buffers, in which no matrix can be told "
            "from another: use DDP, FSDPStrategy or ModelParallelStrategy; for parameters of your own, add_param_group."
        )

    def _check_gradient(self, shard: Tensor, gradient: Tensor) -> None:
        if gradient.shape != shard.shape:
            raise ValueError(
                f"{type(self).__name__} found a gradient that is {described(gradient)} at a parameter that is "
                f"{described(shard)}: the parameter was replaced after the backward pass. Call zero_grad() then."
            )
        if gradient.layout == torch.strided and not gradient.is_complex():
            return
        raise ValueError(
            f"{type(self).__name__} needs dense, real gradients, got {gradient.layout}, {gradient.dtype}, "
            f"{tuple(gradient.shape)}. Sparse: build the layer with sparse=False or give this parameter to "
            "torch.optim.SparseAdam. Complex: keep the parameter as real numbers; use torch.view_as_complex in the "
            "forward."
        )

    @abstractmethod
    def reset_moments(self) -> None:
        """Resets the optimizer's averages of gradients, between steps; the statistics of the rules stay."""

    @abstractmethod
    def _rules(self, group: Mapping[str, Any]) -> GroupRules:
        """Returns the rules by which a group's gradients are measured and clipped."""

    @abstractmethod
    def _member_state(
        self, parameter: Tensor, group: Mapping[str, Any], sharding: Sharding
    ) -> tuple[dict[str, Tensor], DenseMoments, dict[str, Tensor]]:
        """Returns the last three fields of a parameter's `Member`."""

    @abstractmethod
    def _apply(self, batches: Sequence[Batch]) -> None:
        """Updates the parameters, with clipped gradients times ``factor``, and counts the step."""


# --- the stages ---


def _share_scalars(batches: Sequence[Batch]) -> None:
    """Gives the scalars of a parameter to ranks that hold nothing of it, for which torch loads none under FSDP1."""
    before = [batch.passes.load_scalars() for batch in batches]
    rows = []
    for batch, numbers in zip(batches, before, strict=True):
        is_held = torch.tensor([member.shard.numel() > 0 for member in batch.members], device=batch.device)
        rows.append(torch.stack([torch.where(is_held, numbers[name], 0).to(batch.dtype) for name in batch.scalars]))
    # No scalar is below 0.
    rows = all_reduce_(rows, [batch.groups for batch in batches], dist.ReduceOp.MAX)
    for batch, numbers, values in zip(batches, before, rows, strict=True):
        batch.passes.store_scalars(
            {name: row.to(numbers[name].dtype) for name, row in zip(batch.scalars, values, strict=True)}
        )


def _measure(batches: Sequence[Batch]) -> None:
    """Measures max|g| of whole gradients, with one collective per process group; then clips elements."""
    rows = [_measure_shards(batch) for batch in batches]
    groups = [batch.groups for batch in batches]
    # In every group, so that a rank also skips the step for gradients of which it has no part.
    largest = torch.cat([amaxes[0].to(rows[0].device) for amaxes in rows]).amax()
    all_groups = tuple(dict.fromkeys(chain.from_iterable(groups)))
    *rows, largest = all_reduce_([*rows, largest], [*groups, all_groups], dist.ReduceOp.MAX)
    finite = largest < torch.inf  # none of them is NaN
    for batch, amaxes in zip(batches, rows, strict=True):
        batch.finite = finite.to(batch.device)
        _clip_elements(batch, amaxes)


def _measure_shards(batch: Batch) -> Tensor:
    """Measures the rows max|g| and, where masters need a scale, max|p|."""
    amax, rules = batch.passes.measure(), batch.rules
    limit = largest_root(batch.dtype, rules.squares_summed)  # squares must fit, unless a rule shrinks elements first
    if rules.norms.brings_below(limit):
        limit = torch.finfo(batch.dtype).max
    rows = [torch.where(amax <= limit, amax, torch.inf)]  # NaN is not <=
    if rules.has_masters:
        rows.append(batch.passes.measure(weights=True))
    return torch.stack(rows)


def _clip_elements(batch: Batch, amaxes: Tensor) -> None:
    """Decides who takes the step, resets moments (MoRet), and applies the rule for elements.

    ``amaxes`` has the rows of `_measure_shards`, of whole parameters.
    """
    numbers, amax, interval = batch.passes.load_scalars(), amaxes[0], batch.rules.reset_interval
    taken = batch.finite & (amax >= 0)
    if interval is not None:
        reset = taken & ((numbers["steps"] + 1) % interval == 0)
        numbers["steps_since_reset"] = numbers["steps_since_reset"].masked_fill(reset, 0)
        numbers["mean_weight"] = numbers["mean_weight"].masked_fill(reset, 0.0)
    numbers |= {"amax": amax, "taken": taken, "weight": taken.to(batch.dtype)}
    if len(amaxes) > 1:
        numbers["weight_amax"] = amaxes[1]
    largest = batch.rules.elements.decide(torch.where(taken, amax, batch.zero), numbers)
    # Squares are summed in units of the largest element after the clip where they would not fit otherwise.
    fits = (largest > _SMALL) & (largest < _LARGE)
    numbers["unit"] = largest.clamp(min=torch.finfo(batch.dtype).tiny).masked_fill(fits, 1.0)
    numbers["changed"] = torch.zeros_like(amax)
    batch.numbers = numbers


def _clip_norms(batches: Sequence[Batch]) -> None:
    """Applies the rules for norms."""
    measured = [batch for batch in batches if batch.measures_norms]
    for batch in measured:
        batch.sums = batch.passes.squares(batch.decision())
    _set_norms(measured)
    bounded = [batch.numbers["norm"] for batch in measured if isinstance(batch.rules.norms, GradClip)]
    total = norm_of(torch.cat([norms.to(bounded[0].device) for norms in bounded])) if bounded else None
    for batch in batches:
        factor = batch.numbers["factor"] = batch.rules.norms.factor(batch.numbers, total)
        if batch.measures_norms:
            batch.numbers["norm_after"] = batch.numbers["norm"] * factor


def _set_norms(batches: Sequence[Batch]) -> None:
    """Sets norms of whole gradients, without a rule as yet, and numbers of changed elements; a collective per group."""
    sums = [batch.sums for batch in batches if batch.sums is not None]
    rows_of_batches = all_reduce_(sums, [batch.groups for batch in batches], dist.ReduceOp.SUM)
    for batch, rows in zip(batches, rows_of_batches, strict=True):
        squares, changed = torch.where(batch.numbers["taken"], rows, batch.zero)
        norm = squares.sqrt()
        whole = (norm * batch.numbers["unit"]).clamp_(max=torch.finfo(rows.dtype).max)
        batch.numbers |= {"norm": whole, "norm_after": whole, "norm_in_units": norm, "changed": changed}


def _statistics(batch: Batch) -> tuple[list[Tensor], list[Tensor | None]]:
    numbers = batch.numbers
    columns = [numbers.get(name) for name in ("amax", "threshold", "changed", "norm", "norm_after")]
    columns.append(numbers.get("steps_since_reset", numbers["steps"]))
    return [member.parameter for member in batch.members], columns
