"""Conversion of one module, in place, and back: which modules can be converted, and why others cannot."""

from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_lowbit.nn.core.inputs import COMPUTED
from lightning_lowbit.nn.layers.host import PRODUCTS, Host, Product, add_products, remove_products
from lightning_lowbit.nn.layers.known_linears import check_registered
from lightning_lowbit.nn.layers.layer import QuantizedLayer, clean_name
from lightning_lowbit.nn.layers.multihead import uncalled_projections
from lightning_lowbit.nn.layers.registry import host_class, quantized_class
from lightning_lowbit.nn.layers.wrapped import follow_class, replaced_forward

COMPUTED_WEIGHT = "its weight is computed (torch.nn.utils.parametrize)"

_Model = TypeVar("_Model", bound=nn.Module)


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer that can be converted, or has been."""
    found = quantized_class(type(module))
    return found is not None and found.kind == "linear"


def convertible(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that can be converted, or have been, by the names of their layers: that of the module, or
    of each product of a host, as it is called once it is converted."""
    found: dict[str, nn.Module] = {}
    never_called = uncalled_projections(model)
    for name, module in model.named_modules():
        if module in never_called or getattr(module, "kind", None) == "attention":  # asked for apart
            continue
        if quantized_class(type(module)) is not None:
            if obstacle(module) is None:
                found[name] = module
        elif not isinstance(module, Host) and (cls := host_class(type(module))) is not None:
            products = {} if replaced_forward(module) or odd_parameter(module) else cls.make_products(module)
            found |= {f"{name}.{PRODUCTS}.{product}".lstrip("."): module for product in products}
    return found


def obstacle(module: Any) -> str | None:
    """Why a layer, or a host, cannot be converted although its class can; None if it can, or has been.

    Raises:
        ValueError: it is of a class that was registered as linear, and has no weight of two dimensions.
    """
    if isinstance(module, (QuantizedLayer, Host)):
        return None
    cls = quantized_class(type(module))
    if cls is not None and (own := cls.obstacle(module)) is not None:
        return own
    if cls is not None and is_parametrized(module):
        return COMPUTED_WEIGHT
    if without_weight(module):
        return "it has no weight yet"
    if (other := replaced_forward(module)) is not None:
        return f"its forward pass was replaced, by {other}"
    if (odd := odd_parameter(module)) is not None:
        return odd
    check_registered(module)
    settings = (name for name in QuantizedLayer.__annotations__ if name not in ("weight", "bias"))
    clash = next((name for name in settings if hasattr(module, name)), None)
    return None if clash is None else f"it has an attribute {clash}, which means something else in converted layers"


def odd_parameter(module: nn.Module) -> str | None:
    """What is odd about a parameter of a layer, or of a host, such as ``its weight is complex64``: no quantized layer
    computes with it. None if nothing is."""
    is_host = host_class(type(module)) is not None
    for name, parameter in module.named_parameters(recurse=is_host):  # some hosts have the matrices in a child
        for kind, usual in ((parameter.dtype, COMPUTED), (parameter.layout, (torch.strided,))):
            if kind not in usual:
                return f"its {name} is {str(kind).removeprefix('torch.')}"
    return None


def without_weight(module: nn.Module) -> bool:
    """Whether a lazy module waits for its first batch."""
    return any(is_lazy(parameter) for parameter in module.parameters(recurse=False))


def convert_layer(model: nn.Module, name: str) -> Any:
    """Converts the layer of a name that :func:`convertible` gives, in place, and returns it."""
    host_name, _, product = name.rpartition(f"{PRODUCTS}.")
    if product != name:
        host: Any = model.get_submodule(host_name.rstrip("."))
        add_products(host, host_class(type(host)))  # type: ignore[arg-type]
        layer: Any = host.product(product)
        layer.name_in_model = clean_name(name)
        return layer
    layer = model.get_submodule(name)
    follow_class(layer)
    layer.__class__ = quantized_class(type(layer))
    layer.name_in_model = clean_name(name) or f"{type(layer).__name__} {tuple(layer.weight.shape)}"
    parent, _, child = name.rpartition(".")
    caller = host_class(type(model.get_submodule(parent)))
    if caller is not None and child in caller.called_layers:
        add_products(model.get_submodule(parent), caller)
    return layer


def restore_classes(model: _Model) -> _Model:
    """Gives converted modules their classes back, in place; their weights stay as they are. Returns the model."""
    for module in list(model.modules()):
        if isinstance(module, Host):
            remove_products(module)
        elif not isinstance(module, QuantizedLayer) or isinstance(module, Product):
            continue
        for name in QuantizedLayer.__annotations__:
            vars(module).pop(name, None)
        module.__class__ = type(module).__bases__[1]
    return model
