"""Plain layers with quantized values as weights, for models whose forward pass quantizes only weights."""

from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_lowbit.kernels import quantize_operand
from lightning_lowbit.kernels.memory import overlaps
from lightning_lowbit.nn.casts.facts import group_by_reason, obstacle
from lightning_lowbit.nn.conversion.context import ForwardContext
from lightning_lowbit.nn.layers.classes import restore_classes
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from lightning_lowbit.nn.layers.multihead import Projection
from lightning_lowbit.quant import Cast, blend

_Model = TypeVar("_Model", bound=nn.Module)

TAKES = {"stack", "annealed", "shared amax", "unquantized", "other dgrad_w", "no amax", "zero points", "level per row"}
TAKES |= {"delayed", "surrogate", "unpackable"}


@torch.no_grad()
def bake(model: _Model) -> _Model:
    """Turns converted layers back into plain ones, with quantized values as weights, in place; returns the model.

    The result does not need this package. Weights keep their dtype and hold the values of the forward pass. Results are
    the same in float32 (up to the order of sums); under autocast, a factor per row or tensor adds one rounding.

    Args:
        model: converted, or made by :func:`lightning_lowbit.restore`. Call it under the autocast of training, to whose
            dtype weights are rounded first; a restored model has it.

    Raises:
        ValueError: a layer also quantizes activations, rotates, smooths, or rounds its weight stochastically; another
            module shares a weight that would change; or the model is sharded. The model is then unchanged.

    Examples:
        >>> model = bake(restore(MyModule(), "last.ckpt"))  # trained with IntegerPrecision(4, activation_bits=None)
        >>> torch.save(model.state_dict(), "int4_values.pt")
    """
    layers = quantized_layers(model)
    if not layers:
        raise ValueError("The model has no converted layers to bake. Call restore(model, checkpoint) first.")
    if refused := group_by_reason({name: _obstacle(layer) for name, layer in layers.items()}):
        reason, names = max(refused.items(), key=lambda item: len(item[1]))
        raise ValueError(
            f"No weights alone can stand for {len(names)} of {len(layers)} layers, e.g. {names[0]}: {reason}. Keep the "
            "restored model, which computes as it was trained."
        )
    _check_tied(model, layers)
    context = ForwardContext.of(model)
    with nullcontext() if context is None else context.enter(model.eval()):
        for layer in layers.values():
            if layer.casts.fprop_w is not None:
                layer.set_weight_matrix(_quantized(layer, layer.weight_matrix()))
    ForwardContext.detach(model)
    return restore_classes(model)


def _obstacle(layer: QuantizedLayer) -> str | None:
    reason = obstacle(layer.casts, TAKES, layer)
    if reason is None and isinstance(layer, Projection) and layer.casts.fprop_w is not None:
        matrix = layer.weight_matrix()
        parts = [_quantized(layer, part) for part in matrix.chunk(layer.parts)]
        if not torch.equal(torch.cat(parts), _quantized(layer, matrix)):
            return "parts of its weight share scales only where queries, keys and values are one tensor"
    return reason


def _check_tied(model: nn.Module, layers: dict[str, QuantizedLayer]) -> None:
    changing = {id(layer.weight): name for name, layer in layers.items() if layer.casts.fprop_w is not None}
    places = {
        f"{name}.{part}": (name, module, parameter)
        for name, module in model.named_modules()
        for part, parameter in module.named_parameters(recurse=False)
    }
    for shared in overlaps({place: parameter for place, (*_, parameter) in places.items()}):
        uses = [places[place] for place in shared]
        for owner in (changing[id(parameter)] for *_, parameter in uses if id(parameter) in changing):
            own = getattr(layers[owner], "owner", layers[owner])
            others = [name for name, module, _ in uses if module is not own]
            if others:
                raise ValueError(
                    f"The weight of {owner} is also that of {others[0]}, which would change with it. Untie them first, "
                    f"e.g. layer.weight = nn.Parameter(layer.weight.clone()), or train with skip=[{owner!r}]."
                )


def _quantized(layer: QuantizedLayer, matrix: Tensor) -> Tensor:
    """Returns the values of the forward pass; of a stack, each matrix is scaled by its own amax."""
    if matrix.dim() > 2:
        return torch.stack([_quantized(layer, part) for part in matrix])
    cast, device = layer.casts.fprop_w, matrix.device.type
    assert isinstance(cast, Cast)
    if torch.is_autocast_enabled(device):
        matrix = matrix.to(torch.get_autocast_dtype(device))
    state = layer.lowbit
    dtype = torch.float32 if state.exact else None
    operand = quantize_operand(matrix, cast, 1, None, layer.scaled_by(matrix), dtype)
    if state.blend is not None:
        operand = blend(matrix, operand, state.blend, state.exact)
    values = operand.values.float()
    return values if operand.factor is None else values * operand.factor
