"""Which layers get which casts when casts change in mid-training, by patterns of layer names."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from torch import nn

from lightning_lowbit.checks import choose
from lightning_lowbit.nn.casts import PHASES, PRESETS, LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike, select
from lightning_lowbit.nn.conversion.smooth_swiglu import smooth_casts
from lightning_lowbit.nn.keys import clean_name
from lightning_lowbit.nn.linear import is_linear


def named_casts(value: CastsLike) -> LinearCasts | str:
    """The casts that :meth:`LowBitPrecision.set_casts` takes, or the name of a phase.

    Raises:
        ValueError: there is no such phase or preset, or a field is wrong.
    """
    if isinstance(value, str):
        choose("phase or preset", value, [*PHASES, *PRESETS])
        return value if value in PHASES else LinearCasts.preset(value)
    return LinearCasts.of(value)


def changed_casts(
    casts: Mapping[str, CastsLike], planned: Mapping[str, LinearCasts], model: nn.Module
) -> dict[str, LinearCasts]:
    """The new casts of each layer that a pattern matches; of several patterns the first one counts.

    Args:
        casts: by pattern, casts, or a phase of the planned casts.
        planned: by layer, the casts it was converted with.
        model: with these layers, and those that stayed in high precision.

    Raises:
        ValueError: a pattern matches no converted layer, or there is no such preset or phase.
    """
    given = {pattern: named_casts(value) for pattern, value in casts.items()}
    changes: dict[str, LinearCasts] = {}
    for pattern, value in given.items():
        for name in match(pattern, planned, model):
            changes.setdefault(name, planned[name].phase(value) if isinstance(value, str) else value)
    return {name: changes[name] for name in planned if name in changes}


def smoothed(
    changes: Mapping[str, LinearCasts], layers: Mapping[str, LinearCasts], model: nn.Module, kind: str
) -> dict[str, LinearCasts]:
    """Changed casts with the smoothing of SwiGLU that the changed model has.

    Args:
        changes: by layer.
        layers: the casts of all converted layers before the change, by name.
        model: with these layers.
        kind: of smoothing, ``"channel"`` or ``"token"``.
    """
    raw = {clean_name(name): name for name, _ in model.named_modules() if clean_name(name) in layers}
    with suppress(ValueError):  # no down projection is quantized any more
        found = smooth_casts(model, {raw[name]: changes.get(name, casts) for name, casts in layers.items()}, kind)
        return {name: found[raw[name]] for name in changes}
    return dict(changes)


def match(pattern: str, converted: Iterable[str], model: nn.Module) -> set[str]:
    """The converted layers that a pattern matches.

    Raises:
        ValueError: it matches none; the message says if it matches layers that were not converted.
    """
    converted = list(converted)
    try:
        return select(converted, [pattern], "casts", "converted layer")
    except ValueError:
        names = [clean_name(n) for n, m in model.named_modules() if isinstance(m, nn.Linear) or is_linear(m)]
        found: list[str] = []
        with suppress(ValueError):
            found = sorted(select([name for name in names if name not in converted], [pattern], "casts"))
        if not found:
            raise
        raise ValueError(
            f"casts: the pattern {pattern!r} matches {', '.join(found)}, left in high precision by skip or only, and "
            "casts are given to converted layers. Convert it, with overrides={...: 'bf16'} if it is to begin in high "
            "precision."
        ) from None
