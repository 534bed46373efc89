"""What a quantized pass takes, and which tracers can follow it; everything else is refused before a kernel meets it."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Proxy

from lightning_lowbit.nn.passes.derivatives import refuse_tangents, refuse_transforms

# In which layers compute: rounding is not defined for complex numbers, and integers have no gradient.
COMPUTED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))

_TRACED = (
    "Layer {}: quantized layers cannot be {}. Use torch.export or `lowbit export`, or go to high precision: "
    "lightning_lowbit.bake(lightning_lowbit.convert(model, 'bf16'))."
)


def check_inputs(layer: str, *tensors: Any, takes_nested: bool = False) -> None:
    """Raises for what a quantized layer cannot take, or be part of: a ``TypeError`` for what is no tensor, and a
    ``ValueError`` for sparse or nested tensors, within transforms of ``torch.func``, and for tracers but those of
    ``torch.compile`` and ``torch.export``."""
    refuse_transforms(layer)
    if torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            if tensor.is_nested:
                if not takes_nested:
                    raise ValueError(
                        f"Layer {layer} takes no nested tensors. Pad them (torch.nested.to_padded_tensor), and give a "
                        "mask, such as key_padding_mask, where the module takes one."
                    )
            elif tensor.layout is not torch.strided:
                raise ValueError(f"Layer {layer} takes dense tensors; got {tensor.layout}. Call its to_dense().")
        elif isinstance(tensor, Proxy):
            raise ValueError(_TRACED.format(layer, "traced by torch.fx"))
        else:
            raise TypeError(f"Layer {layer} takes a Tensor; got {type(tensor).__name__}. Use torch.as_tensor.")
    if torch._C._is_tracing():
        raise ValueError(_TRACED.format(layer, "traced by torch.jit, which keeps random bits and scales fixed"))


def refuse_scripts(layer: str) -> NoReturn:
    """Raises the ``ValueError`` of ``torch.jit.script``."""
    raise ValueError(_TRACED.format(layer, "compiled by torch.jit.script"))


def check_operands(layer: str, *tensors: Tensor | None) -> None:
    """Raises a ``ValueError`` for tensors of other dtypes than :data:`COMPUTED`, or with a tangent."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in COMPUTED:
            got = ", ".join(str(each.dtype) for each in tensors if each is not None)
            raise ValueError(
                f"Layer {layer} is quantized, and takes float16, bfloat16, float32 or float64; got {got}. Convert the "
                "input, or leave a layer with such a weight out, by skip=[...]."
            )
    if not torch.compiler.is_compiling():
        refuse_tangents(layer, *tensors)


def of_nested(layer: str, x: Any, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """A nested tensor of ``multiply(rows)``, of the rows of all sequences together, which is what their scales are of.
    A ``ValueError`` for other nested tensors than those of ``layout=torch.jagged`` without holes."""
    if x.layout is not torch.jagged or not x.is_contiguous():
        raise ValueError(
            f"Layer {layer} takes nested tensors of layout=torch.jagged that are contiguous: make it with "
            "torch.nested.nested_tensor(..., layout=torch.jagged), call its contiguous(), or pad it "
            "(torch.nested.to_padded_tensor)."
        )
    rows: Tensor = torch.nested.nested_tensor_from_jagged(multiply(x.values()), x.offsets())
    return rows
