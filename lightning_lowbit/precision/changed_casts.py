"""Resolves changes of casts during training: from name patterns to the casts of each layer."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from torch import nn

from lightning_lowbit.checks import choose, some
from lightning_lowbit.nn.attention.products import check_attention
from lightning_lowbit.nn.casts.linear_casts import PHASES, PRESETS, LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike, check_grouped_casts
from lightning_lowbit.nn.conversion.smooth_swiglu import smooth_casts
from lightning_lowbit.nn.layers.classes import convertible
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.patterns import clean_name, select


def named_casts(value: CastsLike) -> LinearCasts | str:
    """Parses a value of ``LowBitPrecision.set_casts``: casts, or the name of a phase. Raises ``ValueError``."""
    if isinstance(value, str):
        choose("phase or preset", value, dict.fromkeys([*PHASES, *PRESETS]))
        return value if value in PHASES else LinearCasts.preset(value)
    return LinearCasts.of(value)


def changed_casts(
    casts: Mapping[str, CastsLike], planned: Mapping[str, LinearCasts], model: nn.Module
) -> dict[str, LinearCasts]:
    """Returns the casts that the first matching pattern gives each layer; ``ValueError`` for one that gives none."""
    values = {pattern: named_casts(value) for pattern, value in casts.items()}
    changes: dict[str, LinearCasts] = {}
    for pattern, value in values.items():
        names = matches(pattern, planned, model)
        if names <= changes.keys():
            raise ValueError(
                f"casts: {pattern!r} gives no layer its casts: an earlier pattern names {some(sorted(names))}. "
                "Leave it out, or put it first."
            )
        for name in names - changes.keys():
            changes[name] = planned[name].phase(value) if isinstance(value, str) else value
    return {name: changes[name] for name in planned if name in changes}


def check_changes(layers: Mapping[str, QuantizedLayer], changes: Mapping[str, LinearCasts]) -> None:
    """Raises a ``ValueError`` for other casts, by name, that a layer cannot have."""
    for name, casts in changes.items():
        layers[name].check_casts(casts)
        if layers[name].kind == "attention":
            check_attention(name, casts)
        elif layers[name].kind == "experts" and layers[name].lowbit.grouped == "native":
            check_grouped_casts({name: casts})


def smoothed(
    changes: Mapping[str, LinearCasts], layers: Mapping[str, LinearCasts], model: nn.Module, kind: str
) -> dict[str, LinearCasts]:
    """Adds SwiGLU smoothing of a kind to changed casts; ``layers`` are the casts of all layers before the change."""
    raw = {clean_name(name): name for name, _ in model.named_modules() if clean_name(name) in layers}
    with suppress(ValueError):  # raised if no down projection is quantized anymore
        smooth = smooth_casts(model, {raw[name]: changes.get(name, casts) for name, casts in layers.items()}, kind)
        return {name: smooth[raw[name]] for name in changes}
    return dict(changes)


def matches(pattern: str, converted: Iterable[str], model: nn.Module) -> set[str]:
    """Returns the converted layers that a pattern matches; a ``ValueError`` says why there are none."""
    names = list(converted)

    def left() -> dict[str, str]:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        what = (
            "left in high precision by skip or only, or by default. Convert it, with overrides={...: 'bf16'} if it is "
            "to begin in high precision"
        )
        return {name: what for name in map(clean_name, [*linear, *convertible(model)]) if name not in names}

    return select(names, [pattern], "casts", "converted layer", left)
