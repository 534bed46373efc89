"""The table of conversion: each kind of layer registers a function that returns the converted class of a class."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch.distributed.fsdp import FSDPModule

from lightning_lowbit._torch.sharding import remembered_class
from lightning_lowbit.nn.layers.composite import CompositeLayer
from lightning_lowbit.nn.layers.layer import QuantizedLayer

# A layer, a composite of several layers, or no conversion.
Converted = type[QuantizedLayer] | type[CompositeLayer] | None

_KINDS: list[Callable[[Any], Converted]] = []


def kind(finder: Callable[[Any], Converted]) -> Callable[[Any], Converted]:
    """Registers a function that returns the class that a class of modules is converted to, or None. A decorator."""
    _KINDS.append(finder)
    return finder


@cache
def converted_class(cls: Any) -> Converted:
    """Returns the class that a module of exactly this class is converted to; a converted class itself."""
    if issubclass(cls, (QuantizedLayer, CompositeLayer)):
        return cls
    if issubclass(cls, FSDPModule):
        return _sharded_class(cls)
    return next((converted for finder in _KINDS if (converted := finder(cls)) is not None), None)


def _sharded_class(cls: Any) -> Converted:
    """Returns the converted class of a class that ``fully_shard`` derived from FSDPModule and a module's class."""
    sharded, original, *_ = cls.__bases__
    quantized = converted_class(original)
    if quantized is None:
        return None
    members = {"__deepcopy__": cls.__deepcopy__}
    return remembered_class(quantized, type(f"FSDP{quantized.__name__}", (sharded, quantized), members))


def quantized_class(cls: Any) -> type[QuantizedLayer] | None:
    """Returns the class that a layer of exactly this class is converted to; None if it is no such layer."""
    converted = converted_class(cls)
    return converted if converted is not None and issubclass(converted, QuantizedLayer) else None


def composite_class(cls: Any) -> type[CompositeLayer] | None:
    """Returns the composite class that a module of exactly this class is converted to; None if it has no parts."""
    converted = converted_class(cls)
    return converted if converted is not None and issubclass(converted, CompositeLayer) else None


def _rebuilt(original: type) -> Any:
    cls: Any = converted_class(original)
    return cls.__new__(cls)


def derived(base: type, original: Any, rebuild: Callable[[type], Any] = _rebuilt, **members: Any) -> Any:
    """Makes the class ``Quant…`` of a base and a class that is converted. Its objects are pickled with the original
    class, from which ``rebuild`` makes a converted object without attributes."""

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *rest = original.__reduce_ex__(self, protocol)
        return rebuild, (original,), *rest

    members = {"__module__": __name__, "__reduce_ex__": reduce, **members}
    return type(f"Quant{original.__name__}", (base, original), members)


def __getattr__(name: str) -> Any:
    """Finds the class of a converted ``Conv1D`` by name, as pickle does."""
    if name == "QuantConv1D":
        from transformers.pytorch_utils import Conv1D

        return quantized_class(Conv1D)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
