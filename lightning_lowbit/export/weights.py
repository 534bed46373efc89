"""The weight of each layer as codes and scales, as the forward pass quantizes it, and what no format can hold.

Engines multiply q, k and v, and gate and up, as one matrix with one scale of the tensor: the largest. Layers of such a
group must have been trained with one (``shared_amax``), or are quantized again with it (``rescale``).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_lowbit.checks import some
from lightning_lowbit.export.source import Source
from lightning_lowbit.nn.layers.multihead import Projection
from lightning_lowbit.nn.linear import QuantizedLayer
from lightning_lowbit.quant import Cast, Quantized, quantize

# What engines fuse, by the last part of a name: one pattern for each group of a module.
FUSED = (r"q_proj|k_proj|v_proj", r"gate_proj|up_proj", r"w1|w3", r"query|key|value")


@dataclass(frozen=True)
class Weight:
    """A layer's weight in few bits.

    Attributes:
        name: of the layer in the model.
        layer: the converted layer.
        quantized: codes and scales, ``[out_features, in_features]``, blocks along in_features.
        error: the largest difference from the weight of the training's forward pass; above 0 after ``rescale``.
    """

    name: str
    layer: QuantizedLayer
    quantized: Quantized
    error: float = 0.0

    @property
    def cast(self) -> Cast:
        return self.quantized.cast


def common_obstacle(layer: QuantizedLayer, stacks: bool = False) -> str | None:
    """Why the codes of a layer's weight cannot stand for its forward pass, in words; None if they can. ``stacks`` of
    matrices are refused unless the format holds them."""
    casts = layer.casts
    if layer.weight is None:
        return "it is a product of attention, which has no weight"
    if layer.frozen is not None:
        return "its weight is kept as codes: call lightning_lowbit.unpack_frozen first"
    if isinstance(layer, Projection):
        return "it is a projection of nn.MultiheadAttention, which engines do not have in few bits"
    if layer.weight_matrix().dim() != 2 and not stacks:
        return "its weight is a stack of matrices, such as of experts, or a convolution's"
    if "fprop" in casts.hadamard:
        return "its forward pass rotates weights and activations (hadamard), which engines do not"
    if casts.smooth == "token":
        return "its input is smoothed by tokens, which engines do not"
    if casts.smooth is not None:
        return "its input is smoothed (lightning_lowbit.fold works that into the weights)"
    if layer.blend is not None:
        return f"it is annealed, with λ = {float(layer.blend):g}: train until λ is 1"
    if casts.fprop_w is not None and casts.fprop_w.draws:
        return "its weight is rounded stochastically, anew in each forward pass"
    if "fprop" in casts.subtract_mean:
        return "its forward pass subtracts the mean of the tokens (subtract_mean), which engines do not"
    return None


def groups(source: Source) -> list[list[str]]:
    """Names of the layers that engines fuse, of which each group has more than one."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in source.layers:
        parent, _, last = name.rpartition(".")
        for pattern in FUSED:
            if re.fullmatch(pattern, last):
                found.setdefault((parent, pattern), []).append(name)
    return [names for names in found.values() if len(names) > 1]


@torch.no_grad()
def matrix(source: Source, layer: QuantizedLayer) -> Tensor:
    """The weight ``[out_features, in_features]`` in the dtype in which the training computed."""
    return layer.weight_matrix().detach().to(source.dtype)


@torch.no_grad()
def scale_amax(source: Source, name: str) -> Tensor | None:
    """The amax by which the forward pass scales a weight, 0-d; None if its scale does not depend on one."""
    layer = source.layers[name]
    cast = layer.casts.cast_of("fprop_w")
    if cast is None or not cast.scale.needs_amax:
        return None
    if (shared := layer.shared_amax(source.dtype)) is not None and cast.scale.source == "current":
        return shared
    weight = matrix(source, layer)
    given = layer.scaled_by(weight)
    return weight.abs().amax().float() if given is None else given.detach().float().reshape(())


@torch.no_grad()
def weights(
    source: Source, fused: bool = False, rescale: bool = False, scale_dtype: torch.dtype | None = None
) -> Iterator[Weight]:
    """The weights of all layers that have one matrix, one at a time, in the model's order.

    Args:
        source: the model.
        fused: whether the format's engines take one scale of the tensor for each group of layers.
        rescale: whether to quantize weights again where an engine needs other scales.
        scale_dtype: in which engines keep scales of rows and blocks; None for that of the file.

    Raises:
        ValueError: engines need other scales, and ``rescale`` is False; or a weight is not finite.
    """
    amaxes = _amaxes(source, rescale) if fused else {}
    for name, layer in source.layers.items():
        cast, weight = layer.casts.cast_of("fprop_w"), matrix(source, layer)
        assert isinstance(cast, Cast), name
        if weight.dim() != 2:
            continue
        if not weight.isfinite().all():
            raise ValueError(f"The weight of {name} holds NaN or infinities: export a checkpoint from before.")
        trained = quantize(weight, cast, amax=layer.scaled_by(weight))
        changed = trained
        if name in amaxes:
            changed = quantize(weight, cast, amax=amaxes[name])
        elif scale_dtype is not None and not torch.equal(
            trained.scales.to(scale_dtype).float(), trained.scales.float()
        ):
            changed = _with_scales_in(scale_dtype, weight, trained, name, rescale)
        error = 0.0 if changed is trained else float((changed.dequantize() - trained.dequantize()).abs().max())
        yield Weight(name, layer, changed, error)


def _with_scales_in(dtype: torch.dtype, weight: Tensor, trained: Quantized, name: str, rescale: bool) -> Quantized:
    """Integers of a weight by scales that are rounded to a dtype."""
    short = str(dtype).removeprefix("torch.")
    if not rescale or trained.zero_points is not None:
        raise ValueError(
            f"Engines keep the scales of {name} in {short}, and it was trained with {trained.cast.scale.format} "
            "scales: its weight would differ by their rounding. Train with scales in bf16 ({scale: {format: bf16}}), "
            "give --dtype fp32 for engines that compute in it, or --rescale, which rounds the weight again and tells "
            "the error of each layer."
        )
    rounded = replace(trained, scales=trained.scales.to(dtype).float())
    units = replace(rounded, codes=torch.full_like(trained.codes, 1), zero_points=None).dequantize()
    largest = trained.cast.format.max
    elements = torch.where(units > 0, weight.float() / units, 0).round().clamp(-largest, largest)
    return replace(rounded, codes=trained.cast.format.encode(elements))


def _amaxes(source: Source, rescale: bool) -> dict[str, Tensor]:
    """The amaxes of layers whose groups have several, by name."""
    changed: dict[str, Tensor] = {}
    for names in groups(source):
        own = {name: amax for name in names if (amax := scale_amax(source, name)) is not None}
        if len({float(amax) for amax in own.values()}) > 1:
            largest = torch.stack([*own.values()]).amax()
            changed |= dict.fromkeys(own, largest)
    if changed and not rescale:
        raise ValueError(
            f"Engines multiply {some(changed)} by one scale for the layers of a group, and these were trained with "
            "their own: the outputs would be wrong by the ratio of their scales. Train with shared_amax="
            "['(q|k|v)_proj', 'gate_proj|up_proj'], or give rescale (--rescale), which quantizes their weights again "
            "by the largest amax and tells the error of each layer."
        )
    return changed


def divisor(scale: Tensor) -> Tensor:
    """The number whose reciprocal in float32 is a scale, 0-d float32: engines divide by it.

    A scale that is itself a reciprocal has one, within two neighbors of its reciprocal. For others there may be none,
    and the result is the number that comes closest.
    """
    numbers = [scale.reciprocal()]
    for end in (0.0, torch.inf):
        number = numbers[0]
        for _ in range(2):
            number = number.nextafter(torch.full_like(number, end))
            numbers.append(number)
    near = torch.stack(numbers)
    return near[(near.reciprocal() - scale).abs().argmin()]


def check(source: Source, obstacles: Mapping[str, str | None], format: str) -> None:
    """Raises a ``ValueError`` that names the layers that a format cannot hold, with the reasons."""
    refused: dict[str, list[str]] = {}
    uses = Counter(id(parameter) for _, parameter in source.model.named_parameters(remove_duplicate=False))
    for name, why in obstacles.items():
        if why is None and uses[id(source.layers[name].weight)] > 1:
            why = "its weight is also that of another module (tie_word_embeddings): skip it in training"
        if why is not None:
            refused.setdefault(why, []).append(name)
    if refused:
        told = "; ".join(f"{some(names)}: {why}" for why, names in refused.items())
        raise ValueError(
            f"The format {format} cannot hold {sum(map(len, refused.values()))} of {len(source.layers)} layers. {told}."
        )
