"""What all optimizers here share: a closure, two passes that measure, and then what is done with the gradients."""

from abc import abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_lowbit.distributed import Sharding, local, local_gradient, sharding_of
from lightning_lowbit.optim.guards import GradientStatistics, Guards, measure
from lightning_lowbit.optim.options import OPTIONS, check_options

# What holds for a parameter of fewer than two dimensions where guards are for matrices only.
_UNGUARDED = {"element_clip": None, "norm_clip": None, "reset_interval": None, "warmup_steps": 0, "total_steps": None}

# What a group is asked for in each step by name: a misspelt one, set in mid-training, would be no rule at all.
_RULES = ("element_clip", "norm_clip", "moments", "master_weights")


class Seen(NamedTuple):
    """A parameter that may have a gradient, its number in the optimizer, and part and gradient on this rank."""

    number: int
    parameter: Tensor
    part: Tensor
    gradient: Tensor | None
    sharding: Sharding


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose gradients pass guards.

    A subclass says what a batch of parameters is (`_new_batch`, `_add`) and what is done with measured gradients
    (`_apply`).
    """

    _statistics: list[Guards]
    _given: frozenset[int] = frozenset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
        self._remember_parameters()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also in mid-training."""
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
        """Load a copy. The base class would cast the statistics and counters of a bf16 parameter to bf16.

        Raises:
            ValueError: as the base class; or the moments or master weights are kept in another way.
        """
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            for name in ("moments", "density", "master_weights"):
                if saved.get(name) != group.get(name):
                    raise ValueError(
                        f"The saved state has {name}={saved.get(name)!r}, this {type(self).__name__} "
                        f"{name}={group.get(name)!r}: build it with the saved value, or start without the state."
                    )
        final: dict[str, Any] = {}  # as the user's own pre-hooks leave it: this hook is the last to be registered
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
        """Whether this class, and no wrapped optimizer, keeps a state of that name."""
        return True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step, or none if any gradient of any group holds a NaN, an Inf, or what is too large (`guards`).

        ``closure`` evaluates the model; it runs first, with gradients enabled, and its loss is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        batches = self._batches()
        if batches:
            self._apply(batches, measure(batches))
        for batch in batches:
            batch.forget_gradients()
        self._statistics[:] = batches  # in place: what a compiled step assigns to an optimizer's attributes is lost
        return loss

    def gradient_statistics(self) -> dict[Tensor, GradientStatistics]:
        """What the last step saw of each parameter's gradient: tensors, which nobody has to wait for; no collective."""
        return {parameter: row for batch in self._statistics for parameter, row in batch.statistics().items()}

    def _batches(self) -> list[Guards]:
        batches: list[Guards] = []
        first = 0
        for group in self.param_groups:
            check_options(type(self).__name__, {name: group[name] for name in _RULES if name in group})
            alike: dict[Any, Guards] = {}
            for seen in self._see(group, first):
                is_guarded = len(seen.sharding.shape) > 1 or not group["matrices_only"]
                dtype = statistics_dtype(seen.parameter)
                key = (seen.part.device, dtype, seen.sharding.groups, is_guarded)
                if key not in alike:
                    options = group if is_guarded else ChainMap(_UNGUARDED, group)
                    alike[key] = self._new_batch(options, seen.part.device, dtype, seen.sharding.groups)
                self._add(alike[key], seen, group)
            first += len(group["params"])
            batches.extend(alike.values())
        return batches

    def _see(self, group: Mapping[str, Any], first: int) -> Iterator[Seen]:
        for number, parameter in enumerate(group["params"], start=first):
            self._check_parameter(parameter)
            sharding, gradient = sharding_of(parameter), local_gradient(parameter)
            if gradient is not None:
                self._check_gradient(gradient)
            if gradient is not None or (sharding.groups and parameter.requires_grad):  # another rank may have one
                yield Seen(number, parameter, local(parameter), gradient, sharding)

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
        """Starts the optimizer's averages of gradients anew, between steps; the statistics of the guards go on."""

    @abstractmethod
    def _new_batch(self, options: Mapping[str, Any], device: torch.device, dtype: torch.dtype, groups: Any) -> Guards:
        """An empty batch of parameters with these in common."""

    @abstractmethod
    def _add(self, batch: Guards, seen: Seen, group: Mapping[str, Any]) -> None:
        """Adds a parameter to a batch."""

    @abstractmethod
    def _apply(self, batches: Sequence[Guards], factors: Sequence[Tensor]) -> None:
        """Steps. ``factors``: for each batch what its clipped gradients are multiplied with, [P]."""


def statistics_dtype(parameter: Tensor) -> torch.dtype:
    """In which statistics and moments of a parameter are kept."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
