"""Checks of inputs: tensors that a quantized pass cannot take, and tracers that cannot follow it, are refused."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Proxy

from lightning_lowbit._torch import has_tangents, is_tracing, is_transformed
from lightning_lowbit.nn.core.derivatives import refuse_tangents, refuse_transforms

# The dtypes in which layers compute: complex numbers have no rounding, and integers no gradient.
COMPUTED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))

_TRACED = (
    "Layer {}: quantized layers cannot be {}. Use torch.export or `lowbit export`, or go to high precision: "
    "lightning_lowbit.bake(lightning_lowbit.convert(model, 'bf16'))."
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
