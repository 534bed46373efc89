"""Which classes of modules can be converted, and the classes that they become."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_lowbit.nn.layers.experts import experts_class
from lightning_lowbit.nn.layers.host import PRODUCTS, Host, Product, add_products
from lightning_lowbit.nn.linear import QuantizedLayer, QuantLinear

_Model = TypeVar("_Model", bound=nn.Module)

# What a class becomes: a layer, a host of several, or (None) nothing.
Converted = type[QuantizedLayer] | type[Host] | None


def quantized_class(cls: Any) -> type[QuantizedLayer] | None:
    """The class that a layer of exactly this class is converted to; None if it is no layer that can be converted."""
    found = converted_class(cls)
    return found if found is not None and issubclass(found, QuantizedLayer) else None


def host_class(cls: Any) -> type[Host] | None:
    """The class of hosts that a module of exactly this class is converted to; None if it has no products."""
    found = converted_class(cls)
    return found if found is not None and issubclass(found, Host) else None


@cache
def converted_class(cls: Any) -> Converted:
    """What a module of exactly this class is converted to; a converted class is its own."""
    if issubclass(cls, (QuantizedLayer, Host)):
        return cls
    if issubclass(cls, FSDPModule):
        from torch.distributed.fsdp._fully_shard._fully_shard import get_cls_to_fsdp_cls

        # fully_shard derives a class from FSDPModule and the module's class
        sharded, original, *_ = cls.__bases__
        quantized = converted_class(original)
        if quantized is None:
            return None
        members = {"__deepcopy__": cls.__deepcopy__}
        return get_cls_to_fsdp_cls().setdefault(
            quantized, type(f"FSDP{quantized.__name__}", (sharded, quantized), members)
        )
    return next((found for find in _KINDS if (found := find(cls)) is not None), None)


def derived(base: type, original: Any, **members: Any) -> Any:
    """The class ``Quant…`` of a base and the class that is converted; pickled by the latter."""

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *rest = original.__reduce_ex__(self, protocol)
        return _rebuilt, (original,), *rest

    members = {"__module__": base.__module__, "__reduce_ex__": reduce, **members}
    return type(f"Quant{original.__name__}", (base, original), members)


def _rebuilt(original: type) -> Any:
    cls: Any = converted_class(original)
    return cls.__new__(cls)


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer that can be converted, or has been."""
    found = quantized_class(type(module))
    return found is not None and found.kind == "linear"


def convertible(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that can be converted, or have been, by the names of their layers: that of the module, or
    of each product of a host, as it is called once it is converted."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if quantized_class(type(module)) is not None:
            found[name] = module
        elif not isinstance(module, Host) and (cls := host_class(type(module))) is not None:
            found |= {f"{name}.{PRODUCTS}.{product}".lstrip("."): module for product in cls.make_products(module)}
    return found


def convert_layer(model: nn.Module, name: str) -> Any:
    """Converts the layer of a name that :func:`convertible` gives, in place, and returns it."""
    host_name, _, product = name.rpartition(f"{PRODUCTS}.")
    if product != name:
        host: Any = model.get_submodule(host_name.rstrip("."))
        add_products(host, host_class(type(host)))  # type: ignore[arg-type]
        return host.product(product)
    layer: Any = model.get_submodule(name)
    layer.__class__ = quantized_class(type(layer))
    return layer


def restore_classes(model: _Model) -> _Model:
    """Gives converted modules their classes back, in place; their weights stay as they are. Returns the model."""
    for module in list(model.modules()):
        if isinstance(module, Host):
            delattr(module, PRODUCTS)
        elif not isinstance(module, QuantizedLayer) or isinstance(module, Product):
            continue
        for name in QuantizedLayer.__annotations__:
            vars(module).pop(name, None)
        module.__class__ = type(module).__bases__[1]
    return model


def _linear(cls: Any) -> Converted:
    if cls is nn.Linear:
        return QuantLinear
    if (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        # A linear layer whose weight is stored as [in_features, out_features] (GPT-2).
        return derived(
            QuantizedLayer,
            cls,
            weight_matrix=lambda self: self.weight.t(),
            forward=lambda self, x: QuantizedLayer.forward(self, x),  # as Conv1D names its input
            __repr__=nn.Module.__repr__,
        )
    return None


_KINDS: tuple[Callable[[Any], Converted], ...] = (_linear, experts_class)
