"""Resolves changes of casts during training: from name patterns to the casts of each layer."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from torch import nn

from lightning_lowbit.checks import choose
from lightning_lowbit.nn.casts.linear_casts import PHASES, PRESETS, LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike, select
from lightning_lowbit.nn.conversion.smooth_swiglu import smooth_casts
from lightning_lowbit.nn.layers.classes import convertible
from lightning_lowbit.nn.layers.layer import clean_name


def named_casts(value: CastsLike) -> LinearCasts | str:
    """Parses what :meth:`LowBitPrecision.set_casts` takes: casts, or the name of a phase. Raises ``ValueError``."""
    if isinstance(value, str):
        choose("phase or preset", value, [*PHASES, *PRESETS])
        return value if value in PHASES else LinearCasts.preset(value)
    return LinearCasts.of(value)


def changed_casts(
    casts: Mapping[str, CastsLike], planned: Mapping[str, LinearCasts], model: nn.Module
) -> dict[str, LinearCasts]:
    """The new casts of the layers that the first matching pattern gives them; ``ValueError`` for no match."""
    given = {pattern: named_casts(value) for pattern, value in casts.items()}
    changes: dict[str, LinearCasts] = {}
    for pattern, value in given.items():
        for name in match(pattern, planned, model):
            changes.setdefault(name, planned[name].phase(value) if isinstance(value, str) else value)
    return {name: changes[name] for name in planned if name in changes}


def smoothed(
    changes: Mapping[str, LinearCasts], layers: Mapping[str, LinearCasts], model: nn.Module, kind: str
) -> dict[str, LinearCasts]:
    """Adds SwiGLU smoothing of a kind to changed casts; ``layers`` are the casts of all layers before the change."""
    raw = {clean_name(name): name for name, _ in model.named_modules() if clean_name(name) in layers}
    with suppress(ValueError):  # raised if no down projection is quantized anymore
        found = smooth_casts(model, {raw[name]: changes.get(name, casts) for name, casts in layers.items()}, kind)
        return {name: found[raw[name]] for name in changes}
    return dict(changes)


def match(pattern: str, converted: Iterable[str], model: nn.Module) -> set[str]:
    converted = list(converted)
    try:
        return select(converted, [pattern], "casts", "converted layer")
    except ValueError:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        names = [clean_name(name) for name in dict.fromkeys([*linear, *convertible(model)])]
        found: list[str] = []
        with suppress(ValueError):
            found = sorted(select([name for name in names if name not in converted], [pattern], "casts"))
        if not found:
            raise
        raise ValueError(
            f"casts: the pattern {pattern!r} matches {', '.join(found)}, left in high precision by skip or only, or by "
            "default. Convert it, with overrides={...: 'bf16'} if it is to begin in high precision."
        ) from None
