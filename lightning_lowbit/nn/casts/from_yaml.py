"""Reads the fields of casts from YAML: casts changed by mappings, settings by key."""

from collections.abc import Mapping
from typing import Any

from lightning_lowbit.checks import choose, from_fields
from lightning_lowbit.quant import SURROGATES, Cast, Hadamard


class FrozenDict(dict[str, Any]):
    """A frozen mapping with a hash, to be a field of a frozen dataclass."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)  # pickle and deepcopy would fill an empty one

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("The settings of LinearCasts do not change: make others with LinearCasts.replace(...).")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse


Settings = FrozenDict  # the former name, in pickles


def apply_change(before: Any, value: Any) -> Any:
    """Applies a change to a field: a mapping changes fields of a cast, or entries of a table (None removes one)."""
    if not isinstance(value, Mapping):
        return value
    if isinstance(before, Cast):
        return before.replace(**{str(name): change for name, change in value.items()})  # keys of YAML may be numbers
    if isinstance(before, Hadamard):
        return from_fields(Hadamard, "Hadamard", {**vars(before), **value})
    if isinstance(before, FrozenDict):
        changed = {**before, **{key: apply_change(before.get(key), change) for key, change in value.items()}}
        return {key: change for key, change in changed.items() if change is not None}
    return value


def change_every(start: Mapping[str, Any], changes: Any) -> dict[str, Cast]:
    """Makes the same changes to each cast among some fields."""
    if not isinstance(changes, Mapping):
        raise ValueError(f"casts.every is a mapping of fields of Cast; got {changes!r}.")
    changed = {name: apply_change(value, changes) for name, value in start.items() if isinstance(value, Cast)}
    if not changed:
        raise ValueError("casts.every changes the casts of a preset, and there are none: name a preset that has some.")
    return changed


def read_hadamard(value: Any) -> Hadamard:
    """Reads a transform: one as it is, the size of its groups, or its fields."""
    if isinstance(value, Mapping):
        return from_fields(Hadamard, "Hadamard", value)
    return value if isinstance(value, Hadamard) else Hadamard(value)


def read_surrogate(value: Any) -> str:
    return choose("surrogate", value, SURROGATES)
