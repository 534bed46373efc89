"""Turning the linear layers of any model into quantised ones.

Patterns select layers. A pattern is a regular expression that matches a module when it full-matches its name or what
follows a dot in it: ``lm_head`` matches ``model.lm_head``. A pattern that matches a module holds for all layers inside
it: ``layers\\.0`` stands for the whole first block.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from lightning_lowbit.nn.casts import LinearCasts
from lightning_lowbit.nn.keys import clean_name
from lightning_lowbit.nn.linear import QuantizedLayer, quantized_class

# Mappings before LinearCasts: a command line takes the first that fits, and would fill a LinearCasts with defaults.
CastsLike = str | Mapping[str, Any] | LinearCasts
_Model = TypeVar("_Model", bound=nn.Module)


def convert(
    model: _Model,
    casts: CastsLike,
    skip: Iterable[str] = (),
    only: Iterable[str] | None = None,
    overrides: Mapping[str, CastsLike] | None = None,
    exact: bool = False,
) -> _Model:
    """Quantises the linear layers of a model in place.

    Every ``nn.Linear`` (exactly that class; no subclass) and ``transformers`` ``Conv1D`` changes its class; its
    parameters, their names in ``state_dict`` and references to it stay. Converting again sets the casts again.

    Args:
        model: any module.
        casts: of all layers that no override names: :class:`LinearCasts`, a preset's name, or a mapping of fields.
        skip: patterns of layers to leave alone.
        only: patterns of the layers to convert; None for all.
        overrides: other casts for some layers, by pattern; the first pattern that matches a layer holds.
        exact: GEMMs in float32 over exact operands, rounded once: a slow reference for the emulation.

    Returns:
        The model itself.

    Raises:
        ValueError: a pattern matches no layer, or no layer is left to convert; nothing has been changed then.
    """
    planned = plan(model, casts, skip, only, overrides)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer) and name not in planned:  # converted before, and to be left alone now
            module.full_casts = module.casts = LinearCasts()
    for name, layer_casts in planned.items():
        layer: Any = model.get_submodule(name)
        layer.__class__ = quantized_class(type(layer))  # type: ignore[arg-type]
        layer.full_casts = layer.casts = layer_casts
        layer.exact = exact
    for module in model.modules():
        # In evaluation torch would run these blocks by one fused operation on the raw weights; it asks this flag first.
        if isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.linear1, QuantizedLayer):
            module.activation_relu_or_gelu = 0
        # With padding it would hand its layers a nested tensor, for that operation's sake.
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, QuantizedLayer) for m in module.modules()):
            module.use_nested_tensor = False
    return model


def plan(
    model: nn.Module,
    casts: CastsLike,
    skip: Iterable[str] = (),
    only: Iterable[str] | None = None,
    overrides: Mapping[str, CastsLike] | None = None,
) -> dict[str, LinearCasts]:
    """What :func:`convert` would do: the casts of each layer by name. Arguments and errors are the same."""
    default = LinearCasts.of(casts)
    others = {pattern: LinearCasts.of(value) for pattern, value in (overrides or {}).items()}
    layers = [name for name, module in model.named_modules() if _is_linear(module)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} holds no layer to quantise: torch.nn.Linear (no subclass of it) or transformers' "
            "Conv1D. Layers that are created in configure_model must exist when the Trainer sets up the strategy."
        )
    skipped = select(layers, skip, "skip")
    chosen = layers if only is None else select(layers, only, "only")
    overridden = {pattern: select(layers, [pattern], "overrides") for pattern in others}
    result = {}
    for name in layers:
        if name in chosen and name not in skipped:
            result[name] = next((others[pattern] for pattern in others if name in overridden[pattern]), default)
    if not result:
        raise ValueError(
            f"No layer is left to quantise: {len(layers)} were found, e.g. {_some(layers)}, and skip and only leave "
            "none of them. Skip fewer layers."
        )
    return result


def set_phase(model: nn.Module, phase: str) -> None:
    """Puts all converted layers into a phase, see :meth:`LinearCasts.phase`; per-layer casts keep their differences.

    Raises:
        ValueError: there is no such phase.
    """
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            module.casts = module.full_casts.phase(phase)


def select(names: Sequence[str], patterns: Iterable[str], argument: str, kind: str = "linear layer") -> set[str]:
    """The names that a pattern matches.

    Args:
        names: of modules, or of their weights.
        patterns: regular expressions, see above.
        argument: what the user knows the patterns as.
        kind: what the names are of.

    Raises:
        ValueError: a pattern is no regular expression, or matches nothing.
    """
    if isinstance(patterns, str):
        raise ValueError(f"{argument} is a list of patterns; got the string {patterns!r}. Write [{patterns!r}].")
    selected: set[str] = set()
    for pattern in patterns:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{argument}: {pattern!r} is not a regular expression ({error}).") from None
        matched = {name for name in names if _matches(compiled, clean_name(name))}
        if not matched:
            raise ValueError(
                f"{argument}: the pattern {pattern!r} matches no {kind}. There are {len(names)}, e.g. {_some(names)}. "
                "A pattern must match a whole name or a trailing part of it after a dot."
            )
        selected |= matched
    return selected


def _matches(pattern: re.Pattern[str], name: str) -> bool:
    parts = name.split(".")
    ends = range(1, len(parts) + 1)  # the layer and the modules around it
    return any(pattern.fullmatch(".".join(parts[start:end])) for end in ends for start in range(end))


def _some(layers: Sequence[str]) -> str:
    return ", ".join(layers if len(layers) <= 4 else [*layers[:3], layers[-1]])


def _is_linear(module: nn.Module) -> bool:
    return quantized_class(type(module)) is not None  # type: ignore[arg-type]
