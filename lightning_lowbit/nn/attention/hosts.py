"""Which modules compute attention, and how their calls of ``F.scaled_dot_product_attention`` reach the products.

A module attends if its class calls that function, or transformers' attention interface, in a method or in a function
that a method calls. Its calls are found while its forward pass runs, by a ``TorchFunctionMode``: nothing is replaced.
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
from lightning_lowbit.nn.layers.host import PRODUCTS, Host, Product, add_products
from lightning_lowbit.nn.layers.layer import QuantizedLayer, clean_name
from lightning_lowbit.nn.layers.multihead import MultiheadHost, multihead_class
from lightning_lowbit.nn.layers.registry import derived

MultiheadHost.quantized_attention = staticmethod(attend)

_NAMES = ("scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS")


class AttentionHost(Host):
    """Base class of modules whose attention is quantized, and which are otherwise as they were."""

    @staticmethod
    def make_products(host: Any) -> dict[str, Product]:
        return {name: ActivationProduct(host) for name in PRODUCTS_OF_ATTENTION}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) if self.is_plain else self._quantized_forward(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.13 does not trace all functions within a mode
    def _quantized_forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Calls(self.products):
            return super().forward(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Takes calls of ``F.scaled_dot_product_attention`` to the products of the innermost module that attends."""

    def __init__(self, products: dict[str, Any]) -> None:
        super().__init__()
        self.products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return attend(self.products, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attending(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that attend, by the names of the two products that each has or would have."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        cls: Any = type(module)
        if _host_class(cls) is not None:
            found |= {f"{name}.{PRODUCTS}.{product}".lstrip("."): module for product in PRODUCTS_OF_ATTENTION}
    return found


def other_attention(module: Any) -> str | None:
    """How a module of transformers computes attention, if not by ``F.scaled_dot_product_attention``."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) and name != "sdpa" else None


def is_attention(name: str) -> bool:
    """Whether the name of a layer is that of one of attention's products."""
    host, _, product = name.rpartition(".")
    return product in PRODUCTS_OF_ATTENTION and host.rpartition(".")[2] == PRODUCTS


def convert_attention(model: nn.Module, name: str) -> Any:
    """Converts the product of a name that :func:`attending` gives, in place, and returns it."""
    path, _, product = name.rpartition(f"{PRODUCTS}.")
    host: Any = model.get_submodule(path.rstrip("."))
    original: Any = type(host)
    cls = _host_class(original)
    assert cls is not None
    add_products(host, cls)
    products = getattr(host, PRODUCTS)
    if product not in products:  # of nn.MultiheadAttention, which has products of its own
        products.update(AttentionHost.make_products(host))
    layer = products[product]
    layer.name_in_model = clean_name(name)
    return layer


@cache
def _host_class(cls: Any) -> type[Host] | None:
    multihead = multihead_class(cls)
    if multihead is not None and issubclass(multihead, MultiheadHost):
        return multihead
    if issubclass(cls, AttentionHost):
        return cls
    if issubclass(cls, (Host, QuantizedLayer)) or not _calls_attention(cls):
        return None

    @wraps(cls.forward)  # its signature, which callers may ask for
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return AttentionHost.forward(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *rest = cls.__reduce_ex__(self, protocol)
        return _rebuilt, (cls,), *rest

    host: type[Host] = derived(AttentionHost, cls, forward=forward, __reduce_ex__=reduce)
    return host


def _rebuilt(original: Any) -> Any:
    cls: Any = _host_class(original)
    return cls.__new__(cls)


def _calls_attention(cls: type) -> bool:
    """Whether the forward pass of a class calls attention: itself, in a method, or in a function that these call."""
    waiting, seen = ["forward"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or (method := _function(getattr(cls, name, None))) is None or method is _NO_FORWARD:
            continue
        seen.add(name)
        if _reaches(method, 1):
            return True
        waiting += [other for other in _names(method.__code__) if not hasattr(nn.Module, other)]
    return False


_NO_FORWARD = nn.Module.forward


def _reaches(function: FunctionType, depth: int) -> bool:
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if name in _NAMES or value is F.scaled_dot_product_attention:
            return True
        if depth and (called := _function(value)) is not None and _reaches(called, depth - 1):
            return True
    return False


def _function(value: Any) -> FunctionType | None:
    """The function behind decorators, if any."""
    value = inspect.unwrap(value) if callable(value) else None
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
