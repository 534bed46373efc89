"""Layers whose weights are scaled by one amax.

Inference engines run projections of one input (q, k and v; gate and up) as one GEMM, whose weight has one scale per
tensor. If each was trained with its own scale, the weights differ from those of training. Here all weights of a group
are scaled by the group's amax, of whole weights, however they are sharded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_lowbit.checks import some
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.patterns import select
from lightning_lowbit.nn.layers.layer import clean_name, quantized_layers
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.shard import amax_of


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
        if frozen := [name for group in names for name in group if layers[name].frozen is not None]:
            raise ValueError(
                f"shared_amax: {some(frozen)}: the weights are kept as codes, and are not scaled again. Leave out what "
                "matches them, or call lightning_lowbit.unpack_frozen(model) first."
            )
        self._groups = [[layers[name] for name in group] for group in names]

    @torch.inference_mode(False)  # evaluation may come first, and passes of training save them
    @torch.no_grad()  # which the line above ends
    def measure(self, of_weights: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None) -> None:
        """Measures the amaxes of the weights before a forward pass; sharded ones by ``parameter_amaxes``."""
        weights = [layer.weight for group in self._groups for layer in group]
        each = [amax_of(weight) for weight in weights] if of_weights is None else of_weights(weights)
        of_groups = torch.split(torch.stack([*each]), [len(group) for group in self._groups])
        for group, amaxes in zip(self._groups, of_groups, strict=True):
            shared = amaxes.amax()  # a new tensor: a pending backward pass may read the former one
            for layer in group:
                layer.weight_amax = shared

    def release(self) -> None:
        for group in self._groups:
            for layer in group:
                vars(layer).pop("weight_amax", None)


def groups(casts: Mapping[str, LinearCasts], patterns: Iterable[str]) -> list[list[str]]:
    """Groups of layers that share an amax, by name: a pattern matches two or more of them within one module.

    ``casts`` are those of each layer outside any phase. Groups in high precision are left out. It is a ``ValueError``
    if a pattern matches no two layers of a module, a layer is in two groups, or the weights of a group differ in their
    casts or are not scaled by an amax.
    """
    select([*casts], patterns, "shared_amax")  # all of them, or else raises
    found: list[list[str]] = []
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
        found += [names for names in together if any(casts[name].fprop_w is not None for name in names)]
    misfits = [(names, why) for names in found if (why := _misfit({name: casts[name] for name in names})) is not None]
    if misfits:
        (names, why), others = misfits[0], [name for names, _ in misfits[1:] for name in names]
        also = f" Nor can {some(others)}." if others else ""
        raise ValueError(
            f"shared_amax: {', '.join(names)} cannot share an amax: {why}.{also} Leave out what matches them, or give "
            "them casts that have one, with overrides; layers in high precision, by skip, take no part."
        )
    members = [name for names in found for name in names]
    if twice := sorted({name for name in members if members.count(name) > 1}):
        raise ValueError(f"shared_amax: {', '.join(twice)} would be in several groups. Let one pattern match it.")
    return found


def check_groups(casts: Mapping[str, LinearCasts], patterns: Iterable[str]) -> list[list[str]]:
    """As :func:`groups`, but a ``ValueError`` if there is none."""
    if not (found := groups(casts, patterns)):
        raise ValueError("shared_amax: all layers that the patterns match are in high precision. Leave it out.")
    return found


def _misfit(casts: Mapping[str, LinearCasts]) -> str | None:
    """Why layers cannot share an amax; None if they can."""
    of_weights = {name: of_layer.fprop_w for name, of_layer in casts.items()}
    if len({*of_weights.values()}) > 1:
        return f"their weights have other casts ({'; '.join(f'{name}: {cast}' for name, cast in of_weights.items())})"
    cast = next(iter(of_weights.values()))
    if not isinstance(cast, Cast) or not cast.scale.needs_amax:
        return f"{cast} has no scale that the largest magnitude of the tensor decides, as nvfp4 and fp8 per tensor have"
    if any("fprop" in each.hadamard for each in casts.values()):
        return "hadamard rotates the weights of fprop, which then have other amaxes"
    if any(each.smooth == "channel" for each in casts.values()):
        return "smooth='channel' scales the weights by what each batch has"
    return None
