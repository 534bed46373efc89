"""Which modules compute attention, and how their calls of ``F.scaled_dot_product_attention`` reach the products.

A module attends if its class calls that function, or transformers' attention interface, in a method or in a function
that a method calls. Its calls are found while its forward pass runs, by a ``TorchFunctionMode``: nothing is replaced.
"""

from collections.abc import Iterator
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_lowbit.nn.attention.products import PRODUCTS_OF_ATTENTION, ActivationProduct, attend
from lightning_lowbit.nn.layers.classes import derived
from lightning_lowbit.nn.layers.host import PRODUCTS, Host, Product, add_products
from lightning_lowbit.nn.layers.multihead import MultiheadHost
from lightning_lowbit.nn.layers.multihead import find as find_multihead

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
    return products[product]


@cache
def _host_class(cls: Any) -> type[Host] | None:
    multihead = find_multihead(cls)
    if multihead is not None and issubclass(multihead, MultiheadHost):
        return multihead
    if issubclass(cls, AttentionHost):
        return cls
    if issubclass(cls, Host) or not any(_calls_attention(function) for function in _methods(cls)):
        return None

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return AttentionHost.forward(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *rest = cls.__reduce_ex__(self, protocol)
        return _rebuilt, (cls,), *rest

    host: type[Host] = derived(AttentionHost, cls, __reduce_ex__=reduce)
    return host


def _rebuilt(original: Any) -> Any:
    cls: Any = _host_class(original)
    return cls.__new__(cls)


def _methods(cls: type) -> Iterator[FunctionType]:
    for base in cls.__mro__:
        if base is nn.Module:
            return
        for member in vars(base).values():
            function = getattr(member, "__wrapped__", getattr(member, "__func__", member))
            if isinstance(function, FunctionType):
                yield function


def _calls_attention(function: FunctionType, depth: int = 1) -> bool:
    for name in _names(function.__code__):
        if name in _NAMES:
            return True
        value = function.__globals__.get(name)
        if value is F.scaled_dot_product_attention:
            return True
        if depth and isinstance(value, FunctionType) and _calls_attention(value, depth - 1):
            return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
