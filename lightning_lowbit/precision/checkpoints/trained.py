"""The record in a checkpoint of how the model was trained.

    checkpoint["lightning_lowbit"]
        step, micro_batch, seed, phase, blend, …      see ``precision/state.py``
        trained                                       :meth:`Trained.record`; casts are stored by name, once each

It holds only tensors and primitives, so it loads with ``weights_only=True``.
"""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from lightning_lowbit.checks import choose, some
from lightning_lowbit.nn.casts.linear_casts import PRESETS, SMOOTHINGS, LinearCasts
from lightning_lowbit.nn.conversion.shared_amax import groups
from lightning_lowbit.precision.checkpoints.files import entry, state_of
from lightning_lowbit.quant.cast import current_names

VERSION = 1  # of the record

_HP = LinearCasts()


@dataclass(frozen=True)
class Trained:
    """The settings that decide, with the weights, what a trained model computes."""

    layers: Mapping[str, LinearCasts]  # by name, regardless of the phase
    compute_dtype: str
    smooth_swiglu: str | None = None
    shared_amax: tuple[str, ...] = ()
    exact: bool = False
    backend: str = "auto"
    scaler: str | None = None  # class name
    started: Mapping[str, LinearCasts] = field(default_factory=dict)  # casts that have changed since
    outputs: tuple[str, ...] = ()  # output layers that were left out by default

    def __str__(self) -> str:
        counted = Counter(map(str, self.layers.values())).most_common()
        return ", ".join(f"{casts} in {count} layer{'s' * (count > 1)}" for casts, count in counted)

    @property
    def planned(self) -> dict[str, LinearCasts]:
        return {**self.layers, **self.started}

    def record(self) -> dict[str, Any]:
        names: dict[LinearCasts, str] = {}
        for casts in (*self.layers.values(), *self.started.values()):
            if casts not in names:
                name = str(casts)
                names[casts] = name if name not in names.values() else f"{name} ({len(names)})"
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("layers", "started")}
        return {
            "version": VERSION,
            "layers": {layer: names[casts] for layer, casts in self.layers.items()},
            "started": {layer: names[casts] for layer, casts in self.started.items()},
            "casts": {name: primitive(casts) for casts, name in names.items()},
            **rest,
            "shared_amax": [*self.shared_amax],
            "outputs": [*self.outputs],
        }

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Trained":
        """Reads what :meth:`record` wrote; a ``ValueError`` names an invalid entry or a newer version."""
        version = entry(record, "version", int, "trained.")
        if version > VERSION:
            raise ValueError(
                f"The checkpoint's record of how it was trained has version {version}, and this lightning_lowbit reads "
                f"up to {VERSION}. Install the version that wrote it, or a later one."
            )
        named = entry(record, "casts", Mapping, "trained.")
        casts = {name: LinearCasts.of(_with_current_names(given)) for name, given in named.items()}

        def by_layer(key: str) -> dict[str, LinearCasts]:
            layers = entry(record, key, Mapping, "trained.")
            what = f"casts in the checkpoint's trained.{key}, of"
            return {layer: casts[choose(f"{what} {layer},", name, casts)] for layer, name in layers.items()}

        dtype = choose("compute_dtype in the checkpoint", record.get("compute_dtype"), ("bf16", "fp16", "fp32"))
        smooth = entry(record, "smooth_swiglu", str | None, "trained.")
        if smooth is not None:
            choose("smooth_swiglu in the checkpoint", smooth, SMOOTHINGS)
        patterns = entry(record, "shared_amax", list, "trained.")
        outputs = entry(record, "outputs", list, "trained.", default=[])  # which older versions do not have
        return cls(
            by_layer("layers"),
            dtype,
            smooth,
            tuple(entry({"shared_amax": p}, "shared_amax", str, "trained.") for p in patterns),
            entry(record, "exact", bool, "trained."),
            entry(record, "backend", str, "trained."),
            entry(record, "scaler", str | None, "trained."),
            by_layer("started"),
            tuple(entry({"outputs": name}, "outputs", str, "trained.") for name in outputs),
        )

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> "Trained | None":
        """The record in a checkpoint; None if it has none. A ``ValueError`` names an invalid entry."""
        state = state_of(checkpoint)
        return None if state is None or state.get("trained") is None else cls.read(state["trained"])

    def differences(self, other: "Trained") -> list[str]:
        """Lists how this model (in the checkpoint) and another one (here) differ, one line per difference."""
        there, here = ({n: c for n, c in each.layers.items() if c != _HP} for each in (self, other))
        found: dict[tuple[LinearCasts, LinearCasts], list[str]] = {}
        for name in {**there, **here}:
            pair = there.get(name, _HP), here.get(name, _HP)
            if pair[0] != pair[1]:
                found.setdefault(pair, []).append(name)
        lines = [f"{some(names)}: {_difference(*pair)}" for pair, names in found.items()]
        if self.compute_dtype != other.compute_dtype:
            lines.append(f"all else: computed in {self.compute_dtype} in the checkpoint, in {other.compute_dtype} here")
        sharing = [{frozenset(group) for group in groups(t.layers, t.shared_amax)} for t in (self, other)]
        for group in sharing[0] ^ sharing[1]:
            where = ("in the checkpoint", "here")[group in sharing[1]]
            lines.append(f"{some(sorted(group))}: share an amax {where} only")
        return lines


def _difference(there: LinearCasts, here: LinearCasts) -> str:
    if _HP in (there, here) or {str(there), str(here)} <= PRESETS.keys():
        return f"{there} in the checkpoint, {here} here"
    found: dict[tuple[str, str], list[str]] = {}
    for f in fields(LinearCasts):
        pair = getattr(there, f.name), getattr(here, f.name)
        if pair[0] != pair[1]:
            shown = tuple("hp" if value is None else str(value) for value in pair)
            found.setdefault((shown[0], shown[1]), []).append(f.name)
    return "; ".join(f"{', '.join(names)} {a} in the checkpoint, {b} here" for (a, b), names in found.items())


class Origin(NamedTuple):
    """The state and the training record of the checkpoint from which a plugin was made."""

    state: Mapping[str, Any]
    trained: Trained

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> "Origin":
        """Reads a checkpoint; raises ``ValueError`` if it is damaged or has no training record."""
        state = state_of(checkpoint)
        if state is None or state.get("trained") is None:
            nothing = "no state of lightning_lowbit (saved without the plugin, or weights only)"
            what = nothing if state is None else LACKING
            raise ValueError(
                f"The checkpoint holds {what}, so that it does not tell the casts. Make the plugin as it was made for "
                "training, e.g. FP4Precision('nvfp4', skip=['lm_head']), or call convert(model, casts)."
            )
        # A copy: tensors may be memory-mapped from the file, which may be overwritten.
        return cls(copy.deepcopy(state), Trained.read(state["trained"]))

    def arguments(self) -> dict[str, Any]:
        """The plugin's constructor arguments; ``casts`` are those of most layers, not of each."""
        common = Counter(self.trained.planned.values()).most_common(1)
        return {
            "casts": common[0][0] if common else _HP,
            "seed": self.state["seed"],
            **{name: getattr(self.trained, name) for name in _ARGUMENTS},
        }


LACKING = "the state of a version of lightning_lowbit that did not record the casts"
_ARGUMENTS = ("compute_dtype", "smooth_swiglu", "shared_amax", "exact", "backend")

# Arguments that do not change what a model computes.
CHANGEABLE = (
    "backend",
    "casts_of_checkpoint",
    "exact",
    "fresh_histories",
    "quantize_before_gather",
    "save",
    "scaler",
    "seed",
)


def check_changes(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in changes:
        choose("argument of from_checkpoint (what else decides what is computed is the checkpoint's)", name, CHANGEABLE)
    return changes


def _with_current_names(casts: Any) -> Any:
    """Recorded casts, whose fields may have the names that earlier versions gave them."""
    if not isinstance(casts, Mapping):
        return casts
    return {field: current_names(cast) if isinstance(cast, Mapping) else cast for field, cast in casts.items()}


def primitive(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: primitive(getattr(value, f.name)) for f in fields(value) if f.init}
    if isinstance(value, Mapping):
        return {key: primitive(item) for key, item in value.items()}
    return [primitive(item) for item in value] if isinstance(value, list | tuple) else value
