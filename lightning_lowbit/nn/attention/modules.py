"""Modules that compute attention, and how their calls of ``F.scaled_dot_product_attention`` reach its two products.

A module attends if its class calls that function, or transformers' attention interface, in a method or in a function
that a method calls. A ``TorchFunctionMode`` finds its calls while its forward pass runs: nothing is replaced.
"""

import inspect
from collections.abc import Iterator
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_lowbit.nn.attention.products import PRODUCTS_OF_ATTENTION, ActivationProduct, attend
from lightning_lowbit.nn.layers.composite import PARTS, CompositeLayer, PartLayer, convert_composite
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.layers.multihead import QuantizedMultihead, multihead_class
from lightning_lowbit.nn.layers.registry import derived
from lightning_lowbit.patterns import clean_name

QuantizedMultihead.quantized_attention = staticmethod(attend)

_NAMES = ("scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS")
_NO_FORWARD = nn.Module.forward


class AttendingModule(CompositeLayer):
    """Base class of modules whose attention is quantized, and which are otherwise as they were."""

    @staticmethod
    def make_parts(module: Any) -> dict[str, PartLayer]:
        return {name: ActivationProduct(module) for name in PRODUCTS_OF_ATTENTION}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) if self.is_plain else self._quantized_forward(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.13 does not trace all functions within a mode
    def _quantized_forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Calls(self.parts):
            return super().forward(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Passes calls of ``F.scaled_dot_product_attention`` to the products of the innermost module that attends."""

    def __init__(self, products: dict[str, Any]) -> None:
        super().__init__()
        self.products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return attend(self.products, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attending(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of a model that attend, by the names of the two products that each has or would have."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        cls: Any = type(module)
        if _attending_class(cls) is not None:
            modules |= {f"{name}.{PARTS}.{product}".lstrip("."): module for product in PRODUCTS_OF_ATTENTION}
    return modules


def other_attention(module: Any) -> str | None:
    """Returns how a module of transformers computes attention, if not by ``F.scaled_dot_product_attention``."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) and name != "sdpa" else None


def is_attention(name: str) -> bool:
    """Returns whether a layer's name is that of one of attention's products."""
    path, _, product = name.rpartition(".")
    return product in PRODUCTS_OF_ATTENTION and path.rpartition(".")[2] == PARTS


def convert_attention(model: nn.Module, name: str) -> Any:
    """Converts the product of a name that :func:`attending` returns, in place, and returns it."""
    path, _, product = name.rpartition(f"{PARTS}.")
    module: Any = model.get_submodule(path.rstrip("."))
    cls = _attending_class(type(module))  # type: ignore[arg-type]
    assert cls is not None
    convert_composite(module, cls)
    parts = getattr(module, PARTS)
    if product not in parts:  # of nn.MultiheadAttention, which has parts of its own
        parts.update(AttendingModule.make_parts(module))
    layer = parts[product]
    layer.lowbit.name_in_model = clean_name(name)
    return layer


@cache
def _attending_class(cls: Any) -> type[CompositeLayer] | None:
    multihead = multihead_class(cls)
    if multihead is not None and issubclass(multihead, QuantizedMultihead):
        return multihead
    if issubclass(cls, AttendingModule):
        return cls
    if issubclass(cls, (CompositeLayer, QuantizedLayer)) or not _calls_attention(cls):
        return None

    @wraps(cls.forward)  # its signature, which callers may ask for
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return AttendingModule.forward(self, *args, **kwargs)

    converted: type[CompositeLayer] = derived(AttendingModule, cls, rebuild=_rebuilt, forward=forward)
    return converted


def _rebuilt(original: Any) -> Any:
    cls: Any = _attending_class(original)
    return cls.__new__(cls)


def _calls_attention(cls: type) -> bool:
    """Returns whether the forward pass of a class calls attention: itself, in a method, or in a function of these."""
    names, seen = ["forward"], set[str]()
    while names:
        name = names.pop()
        if name in seen or (method := _function(getattr(cls, name, None))) is None or method is _NO_FORWARD:
            continue
        seen.add(name)
        if _reaches(method, 1):
            return True
        names += [other for other in _names(method.__code__) if not hasattr(nn.Module, other)]
    return False


def _reaches(function: FunctionType, depth: int) -> bool:
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if name in _NAMES or value is F.scaled_dot_product_attention:
            return True
        if depth and (inner := _function(value)) is not None and _reaches(inner, depth - 1):
            return True
    return False


def _function(value: Any) -> FunctionType | None:
    """Returns the function behind decorators, if any."""
    value = inspect.unwrap(value) if callable(value) else None
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
