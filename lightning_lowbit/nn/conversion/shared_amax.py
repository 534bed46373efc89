"""Layers whose weights are scaled by one amax.

Inference engines run projections of one input (q, k and v; gate and up) as one GEMM, whose weight has one scale per
tensor. Weights that were trained with a scale each change under a common one. Here the amax of a group scales all of
its weights in training, too: that of whole weights, however they are sharded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_lowbit.checks import some
from lightning_lowbit.nn.casts.facts import LAYER_FACTS, obstacle
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from lightning_lowbit.patterns import clean_name, select
from lightning_lowbit.quant.shard import amax_of

TAKES = {"unquantized", "activations", "other dgrad_w", "zero points", "level per row", "centered", "smooth tokens"}
TAKES |= {"drawn", "delayed", "surrogate", "unpackable"}


class SharedAmaxes:
    """The amaxes of groups of layers, given by patterns as in :func:`groups`.

    Examples:
        >>> shared = SharedAmaxes(convert(model, "nvfp4"), ["(q|k|v)_proj", "gate_proj|up_proj"])
        >>> for batch in batches:
        ...     shared.measure()
        ...     model(batch).backward()
    """

    def __init__(self, model: nn.Module, patterns: Iterable[str]) -> None:
        layers = quantized_layers(model)
        names = check_groups({name: layer.full_casts for name, layer in layers.items()}, patterns)
        for holds, why in (LAYER_FACTS[fact] for fact in ("frozen codes", "computed")):
            if refused := [name for group in names for name in group if holds(layers[name])]:
                raise ValueError(
                    f"shared_amax: {some(refused)} cannot share an amax: {why}. Leave out what matches them."
                )
        self._groups = [[layers[name] for name in group] for group in names]

    @torch.inference_mode(False)  # evaluation may come first, and passes of training save them
    @torch.no_grad()  # which the line above ends
    def measure(self, amaxes_of: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None) -> None:
        """Measures the amaxes of the weights before a forward pass; sharded ones by ``parameter_amaxes``."""
        weights = [layer.weight for group in self._groups for layer in group]
        amaxes = [amax_of(weight) for weight in weights] if amaxes_of is None else amaxes_of(weights)
        by_group = torch.split(torch.stack([*amaxes]), [len(group) for group in self._groups])
        for group, members in zip(self._groups, by_group, strict=True):
            share(group, members)

    def release(self) -> None:
        for group in self._groups:
            for layer in group:
                layer.lowbit.weight_amax = None


def share(layers: Iterable[QuantizedLayer], amaxes: Tensor) -> None:
    """Scales the weights of layers by the largest of their amaxes, ``[layers]``."""
    shared = amaxes.amax()  # a new tensor: a pending backward pass may read the former one
    for layer in layers:
        layer.lowbit.weight_amax = shared


def groups(casts: Mapping[str, LinearCasts], patterns: Iterable[str]) -> list[list[str]]:
    """Groups of layers that share an amax, by name: a pattern matches two or more of them within one module.

    ``casts`` hold for each layer outside any phase. Groups in high precision are left out. It is a ``ValueError`` if a
    pattern matches no two layers of a module, a layer is in two groups, or the weights of a group differ in their casts
    or are not scaled by an amax.
    """
    select([*casts], patterns, "shared_amax")  # all of them, or else raises
    result: list[list[str]] = []
    for pattern in patterns:
        matched = select([*casts], [pattern], "shared_amax")
        by_module: dict[str, list[str]] = {}
        for name in (name for name in casts if name in matched):
            by_module.setdefault(clean_name(name).rpartition(".")[0], []).append(name)
        together = [names for names in by_module.values() if len(names) > 1]
        if not together:
            raise ValueError(
                f"shared_amax: each layer that {pattern!r} matches is the only one of its module, e.g. "
                f"{next(iter(by_module.values()))[0]}. One pattern matches all that share: '(q|k|v)_proj'."
            )
        result += [names for names in together if any(casts[name].fprop_w is not None for name in names)]
    reasons = [(names, _misfit({name: casts[name] for name in names})) for names in result]
    if misfits := [(names, reason) for names, reason in reasons if reason is not None]:
        (names, reason), others = misfits[0], [name for names, _ in misfits[1:] for name in names]
        also = f" Nor can {some(others)}." if others else ""
        raise ValueError(
            f"shared_amax: {', '.join(names)} cannot share an amax: {reason}.{also} Leave out what matches them, or "
            "give them casts that have one, with overrides; layers in high precision, by skip, take no part."
        )
    members = [name for names in result for name in names]
    if twice := sorted({name for name in members if members.count(name) > 1}):
        raise ValueError(f"shared_amax: {', '.join(twice)} would be in several groups. Let one pattern match it.")
    return result


def check_groups(casts: Mapping[str, LinearCasts], patterns: Iterable[str]) -> list[list[str]]:
    """Returns :func:`groups`; a ``ValueError`` if there are none."""
    if not (result := groups(casts, patterns)):
        raise ValueError("shared_amax: all layers that the patterns match are in high precision. Leave it out.")
    return result


def _misfit(casts: Mapping[str, LinearCasts]) -> str | None:
    """Returns why layers cannot share an amax; None if they can."""
    weights = {name: layer_casts.fprop_w for name, layer_casts in casts.items()}
    if len({*weights.values()}) > 1:
        return f"their weights have other casts ({'; '.join(f'{name}: {cast}' for name, cast in weights.items())})"
    return next(filter(None, (obstacle(layer_casts, TAKES) for layer_casts in casts.values())), None)
