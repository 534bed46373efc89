"""Facts about a layer's weight for which no other form may stand in for it, a sentence for each.

Baked weights, codes of frozen weights, weights that FSDP2 gathers as codes, shared amaxes and exported files stand for
the weight of the forward pass. Each of these names the facts that it takes, and any other fact refuses the layer: a new
fact is refused everywhere until somebody has thought about it.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from lightning_lowbit.checks import some
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.packed import packing_obstacle

if TYPE_CHECKING:
    from lightning_lowbit.nn.casts.linear_casts import LinearCasts


def _state(layer: Any, name: str) -> Any:
    """Returns a part of a converted layer's state; None for a layer that is not converted."""
    return getattr(getattr(layer, "lowbit", None), name, None)


# By fact, whether it holds of a layer, and the sentence.
LAYER_FACTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "product": (lambda layer: layer.weight is None, "it is a product of attention, which has no weight"),
    "sharded": (lambda layer: isinstance(layer.weight, DTensor), "its weight is sharded"),
    "frozen codes": (
        lambda layer: _state(layer, "frozen") is not None,
        "its weight is kept as codes (lightning_lowbit.unpack_frozen makes it a matrix)",
    ),
    "computed": (
        lambda layer: not isinstance(layer.weight, nn.Parameter) or is_parametrized(layer),
        "its weight or bias is computed from others, as by weight_norm, or a buffer: make it a parameter first",
    ),
    "stack": (
        lambda layer: layer.weight_matrix().dim() != 2,
        "its weight is a stack of matrices, such as of experts, or a convolution's",
    ),
    "shared amax": (
        lambda layer: _state(layer, "weight_amax") is not None,
        "it shares an amax, which is measured before each pass",
    ),
    "annealed": (
        lambda layer: _state(layer, "blend") is not None,
        "it is annealed, with λ = {layer.lowbit.blend:g}: train until λ is 1",
    ),
}

# By fact, a value that is true if it holds of casts, and the sentence.
CAST_FACTS: dict[str, tuple[Callable[["LinearCasts"], object], str]] = {
    "unquantized": (lambda c: not isinstance(c.fprop_w, Cast), "fprop_w is not quantized"),
    "activations": (lambda c: c.fprop_x is not None, "it quantizes activations, too ({casts.fprop_x})"),
    "other dgrad_w": (
        lambda c: "dgrad_w" not in c.traits.from_fprop and not c.shared("dgrad_w"),
        "dgrad_w is not the weight that the forward pass used",
    ),
    "no amax": (
        lambda c: not isinstance(c.fprop_w, Cast) or not c.fprop_w.scale.needs_amax,
        "{casts.fprop_w} has no scale that the largest magnitude of the tensor decides, as nvfp4 and fp8 per tensor "
        "have",
    ),
    "zero points": (lambda c: c.fprop_w and c.fprop_w.scale.statistic == "minmax", "fprop_w has zero points"),
    "level per row": (lambda c: c.fprop_w and c.fprop_w.scale.two_level == "row", "fprop_w has a second level per row"),
    "rotated": (lambda c: "fprop" in c.hadamard, "its forward pass rotates weights and activations (hadamard)"),
    "centered": (
        lambda c: "fprop" in c.subtract_mean,
        "its forward pass subtracts the mean of the tokens (subtract_mean), and takes the weight itself for that",
    ),
    "smooth tokens": (lambda c: c.smooth == "token", "its input is smoothed by tokens (smooth='token')"),
    "smooth channels": (
        lambda c: c.smooth == "channel",
        "its input is smoothed (smooth='channel'; lightning_lowbit.fold works that into the weights)",
    ),
    "drawn": (
        lambda c: c.fprop_w and c.fprop_w.draws,
        "its weight is rounded stochastically, anew in each forward pass",
    ),
    "delayed": (
        lambda c: c.fprop_w and c.fprop_w.scale.source == "delayed",
        "fprop_w is scaled by the history of its amax",
    ),
    "surrogate": (lambda c: "fprop_w" in c.surrogate, "the surrogate of fprop_w takes the weight itself"),
    "unpackable": (lambda c: c.fprop_w and packing_obstacle(c.fprop_w), "{value}"),
}


def obstacle(casts: "LinearCasts", takes: Collection[str], layer: Any = None) -> str | None:
    """Returns the sentence of the first fact that is not among ``takes``, keys of ``LAYER_FACTS`` and ``CAST_FACTS``;
    None if there is none. ``layer`` is converted, or an ``nn.Linear``; None for the facts of casts alone."""
    if layer is not None:
        for fact, (holds, sentence) in LAYER_FACTS.items():
            if fact not in takes and holds(layer):
                return sentence.format(layer=layer)
    for fact, (value_of, sentence) in CAST_FACTS.items():
        if fact not in takes and (value := value_of(casts)):
            return sentence.format(casts=casts, value=value)
    return None


def group_by_reason(obstacles: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Returns the names of layers by obstacle; layers without one are left out."""
    names: dict[str, list[str]] = {}
    for name, reason in obstacles.items():
        if reason is not None:
            names.setdefault(reason, []).append(name)
    return names


def explain_groups(names: Mapping[str, list[str]]) -> str:
    """Names the layers of each reason that :func:`group_by_reason` has found, and the reason."""
    return "; ".join(f"{some(layers)}: {reason}" for reason, layers in names.items())
