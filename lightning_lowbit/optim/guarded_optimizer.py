"""The base of all optimizers here: measure, clip (`guards`), then a third stage that each optimizer defines."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_lowbit.distributed import Sharding, local, local_gradient, sharding_of
from lightning_lowbit.optim.batch import SCALARS, Batch, GradientStatistics, Member
from lightning_lowbit.optim.guards import Clipped, Measured, add_sums, clip, measure
from lightning_lowbit.optim.kernel_passes import passes_for
from lightning_lowbit.optim.moments import DenseMoments
from lightning_lowbit.optim.options import OPTIONS, check_options

# Options of parameters of fewer than two dimensions under matrices_only.
_UNGUARDED = {"element_clip": None, "norm_clip": None, "reset_interval": None, "warmup_steps": 0, "total_steps": None}

# Options that are names, checked in each step: a name misspelled in mid-training would silently switch its rule off.
_RULES = ("element_clip", "norm_clip", "moments", "master_weights")

# Parameters of a batch, and what `GradientStatistics` has of them, [P] each.
_Statistics = tuple[list[Tensor], list[Tensor | None]]


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose gradients are clipped by rules.

    A subclass defines the rules (`_rules`), the state of a parameter (`_kept`) and the third stage (`_apply`).
    """

    #: Names of the scalars in the state of a parameter.
    SCALARS: ClassVar[tuple[str, ...]] = SCALARS

    _statistics: list[_Statistics]
    _given: frozenset[int] = frozenset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
        self._remember_parameters()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check_names(param_group)
        super().add_param_group(param_group)
        self._remember_parameters()

    def _check_names(self, param_group: Mapping[str, Any]) -> None:
        for name in param_group:
            if name in OPTIONS and name not in self.defaults:
                raise ValueError(f"{type(self).__name__} has no option {name}: leave it out of the group.")

    def _remember_parameters(self) -> None:
        self._given = frozenset(id(parameter) for group in self.param_groups for parameter in group["params"])
        self._statistics = []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a copy; the base class would cast the statistics and counters of a bf16 parameter to bf16."""
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            for name in ("moments", "density", "master_weights"):
                if saved.get(name) != group.get(name):
                    raise ValueError(
                        f"The saved state has {name}={saved.get(name)!r}, this {type(self).__name__} "
                        f"{name}={group.get(name)!r}: build it with the saved value, or start without the state."
                    )
        final: dict[str, Any] = {}  # after the user's pre-hooks: this one is registered last
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: final.update(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        saved_parameters = chain.from_iterable(group["params"] for group in final["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(saved_parameters, parameters, strict=True):
            for name, value in final["state"].get(index, {}).items():
                if self._is_own(name):
                    is_statistic = value.dtype in (torch.float32, torch.float64)
                    dtype = statistics_dtype(parameter) if is_statistic else value.dtype
                    self.state[parameter][name] = value.to(parameter.device, dtype, copy=True)

    def _is_own(self, name: str) -> bool:
        return True

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
        measured: list[Measured] = []
        clipped: list[Clipped] = []
        if batches:
            measured = measure(batches)
            clipped = clip(batches, measured)
            clipped = add_sums(batches, clipped, self._apply(batches, measured, clipped))
        # In place: an assignment to an optimizer's attribute is lost in a compiled step.
        self._statistics[:] = map(_statistics, batches, measured, clipped)
        return loss

    @classmethod
    def new_scalars(cls, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            name: torch.zeros((), dtype=torch.int64 if name.startswith("steps") else dtype, device=device)
            for name in cls.SCALARS
        }

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
            check_options(type(self).__name__, {name: group[name] for name in _RULES if name in group})
            rules = self._rules(group)
            alike: dict[Any, Batch] = {}
            for parameter in group["params"]:
                number += 1
                self._check_parameter(parameter)
                sharding, gradient = sharding_of(parameter), local_gradient(parameter)
                if gradient is not None:
                    self._check_gradient(gradient)
                elif not (sharding.groups and parameter.requires_grad):  # else another rank may have one
                    continue
                shard, dtype = local(parameter), statistics_dtype(parameter)
                is_guarded = len(sharding.shape) > 1 or not group["matrices_only"]
                key = (shard.device, dtype, sharding.groups, is_guarded)
                if key not in alike:
                    options = rules if is_guarded else {**rules, **_UNGUARDED}
                    alike[key] = Batch(options, shard.device, dtype, sharding.groups, self.SCALARS)
                state, moments, kept = self._kept(parameter, group, sharding)
                alike[key].add(Member(parameter, number, shard, gradient, state, moments, kept))
            batches.extend(alike.values())
        for batch in batches:
            batch.passes = passes_for(batch)
        return batches

    def _check_parameter(self, parameter: Tensor) -> None:
        if id(parameter) in self._given or isinstance(parameter, DTensor):
            return
        raise ValueError(
            f"{type(self).__name__} was given other parameters than it now has: one of {tuple(parameter.shape)} was "
            "put into a group from outside. DeepSpeed's ZeRO does so with flat buffers, in which no matrix can be told "
            "from another: use DDP, FSDPStrategy or ModelParallelStrategy; for parameters of your own, add_param_group."
        )

    def _check_gradient(self, gradient: Tensor) -> None:
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
    def _rules(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options by which a group's gradients are measured, clipped and applied."""

    @abstractmethod
    def _kept(
        self, parameter: Tensor, group: Mapping[str, Any], sharding: Sharding
    ) -> tuple[dict[str, Tensor], DenseMoments, dict[str, Tensor]]:
        """The last three fields of a `Member`."""

    @abstractmethod
    def _apply(
        self, batches: Sequence[Batch], measured: Sequence[Measured], clipped: Sequence[Clipped]
    ) -> Sequence[Tensor | None]:
        """The third stage. Returns what it summed for each batch (`Batch.sums_in_update`), of this rank's shards."""


def _statistics(batch: Batch, measured: Measured, clipped: Clipped) -> _Statistics:
    step = clipped.step
    columns = [measured.amax, step.scalars["threshold"], clipped.changed, clipped.norm, clipped.norm_after]
    return [member.parameter for member in batch.members], [*columns, step.steps_since_reset()]


def statistics_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's statistics and moments."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
