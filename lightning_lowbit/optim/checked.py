"""An optimizer with checked options that loads only states with which it can go on."""

import difflib
import warnings
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_lowbit.checks import some
from lightning_lowbit.distributed import local
from lightning_lowbit.kernels.memory import described
from lightning_lowbit.optim.moments import STATISTICS, Entries, misfit, statistics_dtype
from lightning_lowbit.optim.passes import SCALARS, scalar_dtype
from lightning_lowbit.optim.rules import OPTIONS, check_options
from lightning_lowbit.patterns import clean_name

# Options by which groups of Adams, of Muon and of other optimizers, also of torch's, are told apart: never empty, as
# sharded checkpoints lack lists without elements.
_TELLING = ("moments", "ns_steps", "amsgrad", "momentum_decay", "decoupled_weight_decay")

# Options that make a state, or its step, that of another optimizer.
_FIXED = ("moments", "density", "master_weights", "element_clip", "norm_clip", "decoupled_weight_decay")

_REMEDY = "Take the checkpoint of the same run, or load the weights alone and start with a new state."


class CheckedOptimizer(torch.optim.Optimizer):
    """The base of all optimizers here: it checks options and saved states."""

    #: Names of the scalars in the state of a parameter.
    SCALARS: ClassVar[tuple[str, ...]] = SCALARS

    #: True if the state of a parameter also has entries of another optimizer.
    _has_foreign_state: ClassVar[bool] = False

    _known: frozenset[int] = frozenset()  # ids of the parameters that the groups were built with
    _is_loaded = False  # whether no step was taken since a state was loaded

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
        self._remember_parameters()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check_new_names(param_group)
        super().add_param_group(param_group)
        self._remember_parameters()

    @property
    def _options(self) -> Set[str]:
        """Names of the options that `_check_options` knows."""
        return self.defaults.keys()

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_options(type(self).__name__, options)

    def _check_names(self, param_group: Mapping[str, Any]) -> None:
        for name in param_group:
            if name in OPTIONS and name not in self.defaults:
                raise ValueError(f"{type(self).__name__} has no option {name}: leave it out of the group.")

    def _check_new_names(self, param_group: Mapping[str, Any]) -> None:
        """Checks names, and warns of those that are spelled nearly as an option is. All others are of whoever made the
        group."""
        self._check_names(param_group)
        for name in param_group.keys() - self.defaults.keys():
            if meant := difflib.get_close_matches(name, self.defaults, 1, cutoff=0.8):
                warnings.warn(
                    f"{type(self).__name__} has no option {name}, and leaves it in the group unread. Did you mean "
                    f"{meant[0]}?",
                    stacklevel=4,
                )

    def _remember_parameters(self) -> None:
        self._known = frozenset(id(parameter) for group in self.param_groups for parameter in group["params"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a copy of a result of `state_dict`, or changes nothing.

        Raises:
            ValueError: the state is damaged, of another optimizer, or of other parameters: groups, options, and names,
                shapes and dtypes of entries must be those of a new state.
        """
        if not isinstance(state_dict, dict):
            raise ValueError(
                f"{type(self).__name__} loads what its state_dict() gave, and got {described(state_dict)}."
            )
        final: dict[str, Any] = {}

        def check(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            self._check_saved(loaded)
            final.update(loaded)

        handle = self.register_load_state_dict_pre_hook(check)  # after the user's, which were registered before
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        saved_parameters = chain.from_iterable(group["params"] for group in final["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(saved_parameters, parameters, strict=True):
            for name, value in final["state"].get(index, {}).items():
                if self._owns(name):  # the base class casts statistics and counters of a bf16 parameter to bf16
                    dtype = statistics_dtype(parameter) if value.dtype in STATISTICS else value.dtype
                    self._loaded_state(parameter)[name] = value.detach().to(parameter.device, dtype, copy=True)
        self._is_loaded = True

    def _loaded_state(self, parameter: Tensor) -> dict[str, Any]:
        """Returns where a loaded state of a parameter is."""
        return self.state[parameter]

    def _owns(self, name: str) -> bool:
        """Returns whether an entry of the state is not of another optimizer."""
        return not self._has_foreign_state or name in self.SCALARS

    def _entries(self, parameter: Tensor, group: Mapping[str, Any]) -> Entries:
        """Returns the shapes and dtypes of a parameter's new state, without entries of another optimizer."""
        return {name: ((), scalar_dtype(name, statistics_dtype(parameter))) for name in self.SCALARS}

    def _check_saved(self, saved: Mapping[str, Any]) -> None:
        """Raises a ``ValueError`` if this optimizer cannot go on with a state."""
        groups: Any = saved.get("param_groups")
        state: Any = saved.get("state")
        if not (isinstance(state, dict) and _are_groups(groups)):
            raise ValueError(
                f"{type(self).__name__} loads what its state_dict() gave: 'state', by parameter, and 'param_groups', "
                f"each with its 'params'. The one to load has {described(state)} and {described(groups)} there, or a "
                "group without them: it is damaged, or no optimizer's."
            )
        sizes, needed = ([len(group["params"]) for group in both] for both in (groups, self.param_groups))
        if sizes != needed:
            raise ValueError(
                f"The saved state has parameter groups of {sizes} parameters, this {type(self).__name__} of {needed}: "
                "it is of another model, or of other groups. Build both as they were, or start without the state."
            )
        indices = [*chain.from_iterable(group["params"] for group in groups)]
        if len({*indices}) < len(indices) or not (self._has_foreign_state or state.keys() <= {*indices}):
            raise ValueError(
                f"The saved state is damaged: a parameter is in its groups twice, or it has entries of parameters that "
                f"are in none. {_REMEDY}"
            )
        for group, current in zip(groups, self.param_groups, strict=True):
            self._check_saved_group(group, current)
        self._check_order(groups)
        for number, (group, current) in enumerate(zip(groups, self.param_groups, strict=True)):
            names = current.get("param_names") or group.get("param_names") or group["params"]
            for place, (index, parameter) in enumerate(zip(group["params"], current["params"], strict=True)):
                if fault := self._fault(state.get(index, {}), parameter, current):
                    raise ValueError(
                        f"The saved state of parameter {place} of group {number} ({names[place]!r}, "
                        f"{tuple(parameter.shape)}) does not fit {type(self).__name__}: {fault}. States go to "
                        "parameters by their order: build the model with its layers in the order of the saved run, and "
                        f"the same optimizer. {_REMEDY}"
                    )

    def _check_saved_group(self, saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        owner, names = type(self).__name__, saved.get("param_names", saved["params"])
        if not isinstance(names, list | tuple) or len(names) != len(saved["params"]):
            raise ValueError(f"The saved state is damaged: its param_names are {described(names)}. {_REMEDY}")
        if any((name in saved) != (name in group) for name in _TELLING):
            raise ValueError(
                f"The saved state is that of another optimizer, and {owner} cannot go on with it: build that one. "
                f"{_REMEDY}"
            )
        self._check_names(saved)
        self._check_options({name: saved.get(name, group[name]) for name in self._options & group.keys()})
        for name in _FIXED:
            current = group.get(name)
            if (former := saved.get(name, current)) != current:
                raise ValueError(
                    f"The saved state has {name}={former!r}, this {owner} {name}={current!r}: build the optimizer of "
                    "the saved run, with the saved value, or start without the state."
                )

    def _check_order(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises a ``ValueError`` if parameters with names have changed places; new names are allowed."""
        before, now = (
            [clean_name(str(name)) for group in each for name in group.get("param_names", ())]
            for each in (groups, self.param_groups)
        )
        if before != now and sorted(before) == sorted(now):
            place, name = next((place, name) for place, name in enumerate(now) if name != before[place])
            raise ValueError(
                f"The saved state has the same parameters in another order: place {place} is now that of {name!r}, and "
                f"was that of {before[place]!r}. States go to parameters by their order: give {type(self).__name__} "
                f"its parameters as they were. {_REMEDY}"
            )

    def _fault(self, saved: Any, parameter: Tensor, group: Mapping[str, Any]) -> str:
        """Says why a parameter's saved state does not fit; empty if it does."""
        if not isinstance(saved, dict):
            return f"it is {described(saved)}"
        values = {name: value for name, value in saved.items() if self._owns(name)}
        entries = self._entries(parameter, group) if values else {}
        for name, value in values.items():
            if isinstance(value, DTensor) and isinstance(parameter, DTensor) and name not in self.SCALARS:
                if value.placements != parameter.placements:
                    return f"{name} is sharded as {value.placements}, the parameter as {parameter.placements}"
            elif isinstance(value, Tensor) and (value.layout != torch.strided or value.is_meta != parameter.is_meta):
                return f"{name} is {described(value)}, without the numbers of a dense tensor"
        shards = {name: local(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        more = sorted(map(str, values.keys() - entries))
        return misfit(shards, entries) or (f"nothing reads its {some(more)}" if more else "")


def _are_groups(groups: Any) -> bool:
    """Returns whether these are groups of parameters, by numbers or names."""
    return isinstance(groups, list | tuple) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list | tuple)
        and all(isinstance(index, int | str) for index in group["params"])
        for group in groups
    )
