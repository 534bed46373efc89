"""Which classes are converted, and the classes that they become: each kind of layer registers a function that knows."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch.distributed.fsdp import FSDPModule

from lightning_lowbit.nn.layers.host import Host
from lightning_lowbit.nn.layers.layer import QuantizedLayer

# What a class becomes: a layer, a host of several, or (None) nothing.
Converted = type[QuantizedLayer] | type[Host] | None

_KINDS: list[Callable[[Any], Converted]] = []


def kind(finder: Callable[[Any], Converted]) -> Callable[[Any], Converted]:
    """Registers a function that returns the class that a class of modules is converted to, or None. A decorator."""
    _KINDS.append(finder)
    return finder


@cache
def converted_class(cls: Any) -> Converted:
    """Returns the class that a module of exactly this class is converted to; a converted class itself."""
    if issubclass(cls, (QuantizedLayer, Host)):
        return cls
    if issubclass(cls, FSDPModule):
        return _sharded_class(cls)
    return next((converted for finder in _KINDS if (converted := finder(cls)) is not None), None)


def _sharded_class(cls: Any) -> Converted:
    """Returns the converted class of a class that ``fully_shard`` derived from FSDPModule and a module's class."""
    from torch.distributed.fsdp._fully_shard._fully_shard import get_cls_to_fsdp_cls

    sharded, original, *_ = cls.__bases__
    quantized = converted_class(original)
    if quantized is None:
        return None
    members = {"__deepcopy__": cls.__deepcopy__}
    return get_cls_to_fsdp_cls().setdefault(quantized, type(f"FSDP{quantized.__name__}", (sharded, quantized), members))


def quantized_class(cls: Any) -> type[QuantizedLayer] | None:
    """Returns the class that a layer of exactly this class is converted to; None if it is no such layer."""
    converted = converted_class(cls)
    return converted if converted is not None and issubclass(converted, QuantizedLayer) else None


def host_class(cls: Any) -> type[Host] | None:
    """Returns the class of hosts that a module of exactly this class is converted to; None if it has no products."""
    converted = converted_class(cls)
    return converted if converted is not None and issubclass(converted, Host) else None


def derived(base: type, original: Any, **members: Any) -> Any:
    """Makes the class ``Quant…`` of a base and the class that is converted; its objects are pickled by the latter."""

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *rest = original.__reduce_ex__(self, protocol)
        return _rebuilt, (original,), *rest

    members = {"__module__": __name__, "__reduce_ex__": reduce, **members}
    return type(f"Quant{original.__name__}", (base, original), members)


def _rebuilt(original: type) -> Any:
    cls: Any = converted_class(original)
    return cls.__new__(cls)


def __getattr__(name: str) -> Any:
    """Finds the class of a converted ``Conv1D`` by name, as pickle does."""
    if name == "QuantConv1D":
        from transformers.pytorch_utils import Conv1D

        return quantized_class(Conv1D)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
