"""What a quantized pass cannot take, or be part of: inputs, tracers and derivatives that are refused.

A quantized layer's gradient is an approximation, which has no derivative of its own. Rounding has the derivative zero,
so autograd would take the gradient for a constant. With ``create_graph=True`` the gradients therefore come out of
:class:`_Underivable`, whose backward pass raises. Autograd must meet it on every way from a gradient back to x and w,
which the layer may not have saved. So each function has a second output without elements, the ``mark``, and saves it:
the mark leads to the function's node, and so to all of its inputs.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy

from lightning_lowbit._torch import has_tangents, is_batched, is_tracing, is_transformed

# The dtypes in which layers compute: complex numbers have no rounding, and integers no gradient.
COMPUTED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))

_TRACED = (
    "Layer {}: quantized layers cannot be {}. Use torch.export or `lowbit export`, or go to high precision: "
    "lightning_lowbit.bake(lightning_lowbit.convert(model, 'bf16'))."
)
HIGH_PRECISION = (
    "Compute this part in high precision: plugin.push_phase('penalty', 'bf16') before its forward pass and "
    "plugin.pop_phase('penalty') after its backward pass, without a plugin lightning_lowbit.nn.set_phase(model, "
    "'bf16'); or leave the layer out with skip=[...]."
)


def check_inputs(layer: Any, *tensors: Any) -> bool:
    """Checks the inputs of a layer. Returns whether they are on ``meta``, without values to quantize.

    Raises:
        TypeError: an input is no tensor.
        ValueError: an input is sparse or nested, or has a tangent; a transform of ``torch.func`` is active, or a tracer
            other than ``torch.compile`` and ``torch.export``.
    """
    if torch.compiler.is_compiling():
        refuse_transforms(layer)
        return bool(tensors[0].device.type == "meta")
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
            _check_kind(layer, tensor)
    if is_tracing():
        how = "traced by torch.jit, which keeps random bits and scales fixed"
        raise ValueError(_TRACED.format(layer.name_in_model, how))
    if is_transformed():
        refuse_transforms(layer)
    if has_tangents():
        refuse_tangents(layer, *tensors)
    return bool(tensors[0].is_meta)


def _check_kind(layer: Any, tensor: Any) -> None:
    name = layer.name_in_model
    if isinstance(tensor, Proxy):
        raise ValueError(_TRACED.format(name, "traced by torch.fx"))
    if not isinstance(tensor, Tensor):
        raise TypeError(f"Layer {name} takes a Tensor; got {type(tensor).__name__}. Use torch.as_tensor.")
    if not tensor.is_nested:
        raise ValueError(f"Layer {name} takes dense tensors; got {tensor.layout}. Call its to_dense().")
    if getattr(layer, "kind", None) != "linear":
        raise ValueError(
            f"Layer {name} takes no nested tensors. Pad them (torch.nested.to_padded_tensor), and give a mask, such as "
            "key_padding_mask, where the module takes one."
        )


def refuse_scripts(layer: str) -> NoReturn:
    raise ValueError(_TRACED.format(layer, "compiled by torch.jit.script"))


def refuse_dtypes(layer: str, *tensors: Tensor) -> NoReturn:
    """Raises the ``ValueError`` for other dtypes than those of :data:`COMPUTED`."""
    raise ValueError(
        f"Layer {layer} is quantized, and takes float16, bfloat16, float32 or float64; got "
        f"{', '.join(str(tensor.dtype) for tensor in tensors)}. Convert the input, or leave a layer with such a weight "
        "out, by skip=[...]."
    )


def nested_product(layer: str, x: Any, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies ``multiply`` to the rows of a nested tensor: the rows of all sequences are one matrix, and share its
    scales. A ``ValueError`` for nested tensors other than those of ``layout=torch.jagged`` without holes."""
    if x.layout is not torch.jagged or not x.is_contiguous():
        raise ValueError(
            f"Layer {layer} takes nested tensors of layout=torch.jagged that are contiguous: make it with "
            "torch.nested.nested_tensor(..., layout=torch.jagged), call its contiguous(), or pad it "
            "(torch.nested.to_padded_tensor)."
        )
    rows: Tensor = torch.nested.nested_tensor_from_jagged(multiply(x.values()), x.offsets())
    return rows


# --- derivatives ------------------------------------------------------------------------------------------------------

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
