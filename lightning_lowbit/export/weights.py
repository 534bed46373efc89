"""The weight of each layer as codes and scales, as the forward pass quantizes it, and layers that no format can hold.

Engines multiply q, k and v, and gate and up, as one matrix with one scale of the tensor: the largest. Layers of such a
group must have been trained with one (``shared_amax``), or are quantized again with it (``rescale``).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_lowbit.checks import some
from lightning_lowbit.export.trained_model import TrainedModel
from lightning_lowbit.kernels.memory import overlaps
from lightning_lowbit.nn.casts.facts import explain_groups, group_by_reason, obstacle
from lightning_lowbit.nn.conversion.shared_amax import share
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.layers.multihead import Projection
from lightning_lowbit.quant import Cast, Quantized, quantize
from lightning_lowbit.quant.shard import amax_of

# Layers that engines fuse, by the last part of a name: one pattern for each group of a module.
FUSED = (r"q_proj|k_proj|v_proj", r"gate_proj|up_proj", r"w1|w3", r"query|key|value")

TAKES = {"shared amax", "unquantized", "activations", "other dgrad_w", "no amax", "zero points", "level per row"}
TAKES |= {"delayed", "surrogate", "unpackable"}


@dataclass(frozen=True)
class Weight:
    """A layer's weight in few bits."""

    name: str  # of the layer in the model
    layer: QuantizedLayer
    quantized: Quantized  # ``[out_features, in_features]``, blocks along in_features
    error: float = 0.0  # the largest difference from the weight of the training's forward pass, after ``rescale``

    @property
    def cast(self) -> Cast:
        return self.quantized.cast


def weight_cast(layer: QuantizedLayer) -> Cast:
    cast = layer.casts.fprop_w
    assert isinstance(cast, Cast)
    return cast


def common_obstacle(layer: QuantizedLayer, stacks: bool = False) -> str | None:
    """Returns why the codes of a layer's weight cannot stand for its forward pass, in words; None if they can.
    ``stacks`` of matrices are refused unless the format holds them."""
    if isinstance(layer, Projection):
        return (
            "it is a projection of nn.MultiheadAttention, which engines do not have in few bits: train with "
            "skip=['in_proj']"
        )
    return obstacle(layer.casts, TAKES | {"stack"} if stacks else TAKES, layer)


def check(original: TrainedModel, obstacles: Mapping[str, str | None], format: str) -> None:
    """Raises a ``ValueError`` that names the layers that a format cannot hold, with the reasons."""
    parameters = dict(original.model.named_parameters(remove_duplicate=False))
    uses = {id(parameters[name]) for names in overlaps(parameters) for name in names}
    modules = Counter(id(module) for _, module in original.model.named_modules(remove_duplicate=False))
    tied = "its weight is also that of another module (tie_word_embeddings): skip it in training"
    again = "its module is in the model under several names, and engines have one for each: skip it in training"
    shared = {n: again if modules[id(m)] > 1 else tied for n, m in original.layers.items() if id(m.weight) in uses}
    if refused := group_by_reason({name: obstacles[name] or shared.get(name) for name in obstacles}):
        raise ValueError(
            f"The format {format} cannot hold {sum(map(len, refused.values()))} of {len(original.layers)} layers. "
            f"{explain_groups(refused)}."
        )


def fused_groups(original: TrainedModel) -> list[list[str]]:
    """Returns groups of layers that engines fuse, each of more than one, by name."""
    members: dict[tuple[str, str], list[str]] = {}
    for name in original.layers:
        parent, _, last = name.rpartition(".")
        for pattern in FUSED:
            if re.fullmatch(pattern, last):
                members.setdefault((parent, pattern), []).append(name)
    return [names for names in members.values() if len(names) > 1]


@torch.no_grad()
def matrices(
    original: TrainedModel, together: Sequence[Sequence[str]] = ()
) -> Iterator[tuple[str, Tensor, Mapping[str, Tensor]]]:
    """Yields name and weight of each layer, in the model's order, and all weights that were read for it, each once.

    A weight is ``[out_features, in_features]``, or a stack of such, in the dtype in which the training computed. Layers
    that share an amax are read when the first of them comes, and have the amax from then on. ``together`` are names of
    other layers to read at the same time. A ``ValueError`` for a weight that is not finite.
    """
    companions: dict[str, list[str]] = {}  # by name, all members of its group, and of groups that overlap with it
    for group in (*original.shared, *together):
        joined = [*dict.fromkeys(member for name in group for member in companions.get(name, [name]))]
        companions |= dict.fromkeys(joined, joined)
    waiting: dict[str, Tensor] = {}
    for name in original.layers:
        layers = {} if name in waiting else {member: original.layers[member] for member in companions.get(name, [name])}
        read = {member: _read(member, layer, original.dtype) for member, layer in layers.items()}
        for group in original.shared:
            if group[0] in read:
                share([layers[member] for member in group], torch.stack([amax_of(read[member]) for member in group]))
        waiting |= read
        yield name, waiting.pop(name), read


def _read(name: str, layer: QuantizedLayer, dtype: torch.dtype) -> Tensor:
    weight = layer.weight_matrix().detach().to(dtype)
    if not weight.isfinite().all():
        raise ValueError(f"The weight of {name} holds NaN or infinities: export a checkpoint from before.")
    return weight


@torch.no_grad()
def weights(
    original: TrainedModel, fused: bool = False, rescale: bool = False, scale_dtype: torch.dtype | None = None
) -> Iterator[Weight]:
    """Yields the weights of all layers that have one matrix, one at a time, in the model's order.

    ``fused`` and ``rescale`` are those of a format and its options; ``scale_dtype`` is that of rows' and blocks' scales
    in engines, None for the file's. A ``ValueError`` where engines need other scales, and ``rescale`` is False or no
    such scale is near; or as :func:`matrices`.
    """
    fusing = fused_groups(original) if fused else []
    amaxes: dict[str, Tensor] = {}
    for name, weight, read in matrices(original, fusing):
        layer = original.layers[name]
        cast = weight_cast(layer)
        if weight.dim() != 2:
            continue
        amaxes |= _largest(original, read, [group for group in fusing if group[0] in read], rescale)
        trained = quantize(weight, cast, amax=layer.scaled_by(weight))
        changed = quantize(weight, cast, amax=amaxes[name]) if name in amaxes else trained
        stored = Weight(name, layer, changed, _distance(changed, trained) if name in amaxes else 0.0)
        yield stored if scale_dtype is None else _rounded(stored, scale_dtype, rescale)


def _largest(
    original: TrainedModel, read: Mapping[str, Tensor], fusing: Sequence[Sequence[str]], rescale: bool
) -> dict[str, Tensor]:
    """Returns the largest amax of each group whose layers have several, by layer."""
    changed: dict[str, Tensor] = {}
    for names in fusing:
        trained: dict[str, Tensor] = {}
        for name in names:
            if weight_cast(layer := original.layers[name]).scale.needs_amax:
                amax = layer.scaled_by(read[name])
                trained[name] = amax_of(read[name]) if amax is None else amax.detach().float().reshape(())
        if len({float(amax) for amax in trained.values()}) > 1:
            changed |= dict.fromkeys(trained, torch.stack([*trained.values()]).amax())
    if changed and not rescale:
        raise ValueError(
            f"Engines multiply {some(changed)} by one scale for the layers of a group, and these were trained with "
            "their own: the outputs would be wrong by the ratio of their scales. Train with shared_amax="
            "['(q|k|v)_proj', 'gate_proj|up_proj'], or give rescale (--rescale), which quantizes the weights of such "
            "groups again by the largest amax and tells the error of each layer."
        )
    return changed


def _rounded(weight: Weight, dtype: torch.dtype, rescale: bool) -> Weight:
    trained, short = weight.quantized, str(dtype).removeprefix("torch.")
    if torch.equal(trained.scales.to(dtype).float(), trained.scales.float()):
        return weight
    rounded = replace(trained, scales=trained.scales.to(dtype).float())
    exact = trained.dequantize()
    is_near = (rounded.dequantize() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs()
    if not bool(is_near.all()):  # scales beyond the dtype's range, or among its subnormal numbers
        raise ValueError(
            f"Engines keep the scales of {weight.name} in {short}, whose range does not hold them: give another "
            "--dtype: bf16, or fp32 for engines that compute in it."
        )
    if not rescale:
        raise ValueError(
            f"Engines keep the scales of {weight.name} in {short}, and it was trained with "
            f"{trained.cast.scale.format} scales: its weight would differ by their rounding. "
            f"{training_with_scales(trained.cast, 'fp16' if dtype is torch.float16 else 'bf16')}Give --dtype fp32 for "
            "engines that compute in it, or --rescale, which keeps the codes, rounds the scales, and tells the error "
            "of each layer."
        )
    return replace(weight, quantized=rounded, error=_distance(rounded, trained))


def training_with_scales(cast: Cast, format: str) -> str:
    """Advises how to train with scales in a format, in a sentence; empty for casts that take no such scales."""
    try:
        cast.replace(scale={"format": format})
    except ValueError:  # such as of a mean, or with zero points
        return ""
    return (
        f"Train with scales in {format} (IntegerPrecision(scale_format='{format}'), or casts with fprop_w: {{scale: "
        f"{{format: {format}}}}}). "
    )


def _distance(changed: Quantized, trained: Quantized) -> float:
    return float((changed.dequantize() - trained.dequantize()).abs().max())


def has_second_level(cast: Cast) -> bool:
    """Returns whether scales of blocks are multiplied by a float32 scale of the tensor, or of rows."""
    return bool(cast.scale.two_level) or cast.scale.prescale != 1


def divisor(scale: Tensor) -> Tensor:
    """Returns the number whose reciprocal in float32 is a scale, 0-d float32: engines divide by it. A scale that is
    itself a reciprocal has one, within two neighbors of its reciprocal; for others the result may only come close."""
    numbers = [scale.reciprocal()]
    for end in (torch.zeros_like(scale), torch.full_like(scale, torch.inf)):
        numbers += [numbers[0].nextafter(end), numbers[0].nextafter(end).nextafter(end)]
    near = torch.stack(numbers)
    return near[(near.reciprocal() - scale).abs().argmin()]
