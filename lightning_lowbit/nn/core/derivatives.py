"""Refuses second derivatives: a quantized layer's gradient is an approximation, which has no derivative of its own.

Rounding has the derivative zero, so autograd would take the gradient for a constant. With ``create_graph=True`` the
gradients therefore come out of :class:`_Underivable`, whose backward pass raises. Autograd must meet it on every way
from a gradient back to x and w, which the layer may not have saved. So each function has a second output without
elements, the ``mark``, and saves it: the mark leads to the function's node, and so to all of its inputs.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_lowbit._torch import is_batched, is_transformed

HIGH_PRECISION = (
    "Compute this part in high precision: plugin.push_phase('penalty', 'bf16') before its forward pass and "
    "plugin.pop_phase('penalty') after its backward pass, without a plugin lightning_lowbit.nn.set_phase(model, "
    "'bf16'); or leave the layer out with skip=[...]."
)

Gradients = tuple[Tensor | None, ...]


def mark(ctx: Any, y: Tensor) -> Tensor | None:
    """Makes the second output of an autograd function, and the last tensor that it saves; None without gradients."""
    ctx.set_materialize_grads(False)
    return y.new_empty(0) if True in ctx.needs_input_grad else None


def first_derivative(backward: Callable[[Any, Tensor, Any], Gradients]) -> Callable[..., Gradients]:
    """Decorates the backward pass of an autograd function with a :func:`mark`, whose ``ctx.layer`` names the layer.
    That backward pass gets the gradient of the first output, and the saved tensors before the mark."""

    @wraps(backward)
    def wrapper(ctx: Any, g: Tensor | None, _: Tensor | None = None) -> Gradients:
        if g is None:  # nothing that was differentiated depends on the output
            return (None,) * len(ctx.needs_input_grad)
        refuse_batches(ctx.layer, g)
        *saved, mark_of_inputs = ctx.saved_tensors  # which a recomputed region gives once
        if not torch.is_grad_enabled():
            return backward(ctx, g, saved)
        with torch.no_grad():
            gradients = backward(ctx, g, saved)
        underivable: Gradients = _Underivable.apply(ctx.layer, mark_of_inputs, g, *gradients)  # type: ignore[no-untyped-call]
        return underivable

    return wrapper


class _Underivable(torch.autograd.Function):
    """Returns gradients as they are, which depend on a :func:`mark` and on the gradient of the output."""

    @staticmethod
    def forward(ctx: Any, layer: str, mark_of_inputs: Tensor, g: Tensor, *gradients: Tensor | None) -> Gradients:
        ctx.layer = layer
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Gradients:
        raise ValueError(
            f"Layer {ctx.layer}: the gradient of a quantized layer cannot be differentiated again, as Hessians, "
            f"gradient penalties and second-order meta-learning do. {HIGH_PRECISION}"
        )


def refuse_transforms(layer: Any) -> None:
    """Raises a ``ValueError`` within transforms of ``torch.func``, compiled or not."""
    if _is_transformed():
        raise ValueError(
            f"Layer {layer.name_in_model}: a quantized layer cannot be transformed by torch.func (vmap, grad, vjp, "
            f"jvp, jacrev, ...). Use loss.backward() and a loop. {HIGH_PRECISION}"
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_transformed() -> bool:
    return is_transformed()


def refuse_tangents(layer: Any, *inputs: Tensor) -> None:
    """Raises a ``ValueError`` for inputs or parameters of a layer with tangents, those of forward-mode derivatives."""
    parameters = layer.own_parameters() if hasattr(layer, "own_parameters") else layer.parameters()
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in (*inputs, *parameters)):  # type: ignore[no-untyped-call]
        raise ValueError(
            f"Layer {layer.name_in_model}: a quantized layer has no forward-mode derivative "
            f"(torch.autograd.forward_ad). {HIGH_PRECISION}"
        )


def refuse_batches(layer: str, g: Tensor) -> None:
    """Raises a ``ValueError`` for a batch of gradients where one is taken."""
    if torch.compiler.is_compiling():
        return
    if is_batched(g):
        raise ValueError(
            f"Layer {layer}: the backward pass of a quantized layer takes one gradient at a time, and not a batch of "
            f"them (is_grads_batched=True, vectorize=True, vmap). Take them in a loop. {HIGH_PRECISION}"
        )
