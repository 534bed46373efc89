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
from lightning_lowbit.precision.checkpoints.files import state_of
from lightning_lowbit.quant.cast import current_names
from lightning_lowbit.saved_state import check_state

VERSION = 1  # of the record
_OWNER = "lightning_lowbit.trained"
_RECORD: dict[str, Any] = {
    "layers": {},
    "started": {},
    "casts": {},
    "smooth_swiglu": str | None,
    "shared_amax": [str],
    "outputs?": [str],  # older versions have no outputs
    "exact": bool,
    "backend": str,
    "grouped?": str,  # nor grouped
    "scaler": str | None,
}

_HP = LinearCasts()


@dataclass(frozen=True)
class Trained:
    """The settings on which the results of a trained model depend, besides its weights."""

    layers: Mapping[str, LinearCasts]  # by name, regardless of the phase
    compute_dtype: str
    smooth_swiglu: str | None = None
    shared_amax: tuple[str, ...] = ()
    exact: bool = False
    backend: str = "auto"
    scaler: str | None = None  # class name
    started: Mapping[str, LinearCasts] = field(default_factory=dict)  # casts that have changed since
    outputs: tuple[str, ...] = ()  # output layers that were left out by default
    grouped: str = "auto"

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
        check_state(_OWNER, record, {"version": int})
        if record["version"] > VERSION:
            raise ValueError(
                f"The checkpoint's record of how it was trained has version {record['version']}, and this "
                f"lightning_lowbit reads up to {VERSION}. Install the version that wrote it, or a later one."
            )
        check_state(_OWNER, record, _RECORD)
        casts = {name: LinearCasts.of(_with_current_names(value)) for name, value in record["casts"].items()}

        def by_layer(key: str) -> dict[str, LinearCasts]:
            what = f"casts in the checkpoint's trained.{key}, of"
            return {layer: casts[choose(f"{what} {layer},", name, casts)] for layer, name in record[key].items()}

        choose("compute_dtype in the checkpoint", record.get("compute_dtype"), ("bf16", "fp16", "fp32"))
        if record["smooth_swiglu"] is not None:
            choose("smooth_swiglu in the checkpoint", record["smooth_swiglu"], SMOOTHINGS)
        return cls(
            layers=by_layer("layers"),
            started=by_layer("started"),
            shared_amax=tuple(record["shared_amax"]),
            outputs=tuple(record.get("outputs", ())),
            grouped=record.get("grouped", "auto"),
            **{name: record[name] for name in ("compute_dtype", "smooth_swiglu", "exact", "backend", "scaler")},
        )

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> "Trained | None":
        """Returns the record in a checkpoint; None without one. A ``ValueError`` names an invalid entry."""
        state = state_of(checkpoint)
        return None if state is None or state.get("trained") is None else cls.read(state["trained"])

    def differences(self, other: "Trained") -> list[str]:
        """Lists how this model (in the checkpoint) and another one (here) differ, one line per difference."""
        trained, here = ({n: c for n, c in one.layers.items() if c != _HP} for one in (self, other))
        names: dict[tuple[LinearCasts, LinearCasts], list[str]] = {}
        for name in {**trained, **here}:
            pair = trained.get(name, _HP), here.get(name, _HP)
            if pair[0] != pair[1]:
                names.setdefault(pair, []).append(name)
        lines = [f"{some(layers)}: {_difference(*pair)}" for pair, layers in names.items()]
        if self.compute_dtype != other.compute_dtype:
            lines.append(f"all else: computed in {self.compute_dtype} in the checkpoint, in {other.compute_dtype} here")
        sharing = [{frozenset(group) for group in groups(t.layers, t.shared_amax)} for t in (self, other)]
        for group in sharing[0] ^ sharing[1]:
            where = ("in the checkpoint", "here")[group in sharing[1]]
            lines.append(f"{some(sorted(group))}: share an amax {where} only")
        return lines


def _difference(trained: LinearCasts, here: LinearCasts) -> str:
    if _HP in (trained, here) or {str(trained), str(here)} <= PRESETS.keys():
        return f"{trained} in the checkpoint, {here} here"
    names: dict[tuple[str, str], list[str]] = {}
    for f in fields(LinearCasts):
        pair = getattr(trained, f.name), getattr(here, f.name)
        if pair[0] != pair[1]:
            before, now = ("hp" if value is None else str(value) for value in pair)
            names.setdefault((before, now), []).append(f.name)
    return "; ".join(f"{', '.join(group)} {a} in the checkpoint, {b} here" for (a, b), group in names.items())


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

    def arguments(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the constructor's arguments, with the most frequent casts; ``ValueError`` for other changes."""
        for name in changes:
            what = "argument of from_checkpoint (what else decides what is computed is the checkpoint's)"
            choose(what, name, CHANGEABLE)
        common = Counter(self.trained.planned.values()).most_common(1)
        return {
            "casts": common[0][0] if common else _HP,
            "seed": self.state["seed"],
            **{name: getattr(self.trained, name) for name in _ARGUMENTS},
            **changes,
        }


LACKING = "the state of a version of lightning_lowbit that did not record the casts"
_ARGUMENTS = ("compute_dtype", "smooth_swiglu", "shared_amax", "exact", "backend", "grouped")

# Arguments that do not change the results of a model.
CHANGEABLE = (
    "backend",
    "casts_of_checkpoint",
    "exact",
    "fresh_histories",
    "grouped",
    "quantize_before_gather",
    "save",
    "scaler",
    "seed",
)


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
