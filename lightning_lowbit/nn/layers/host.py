"""Modules with several matrix products, or with one beside other things, such as a stack of experts.

A host keeps its parameters, their names and its place in the model. Each product is a converted layer of its own, a
child of a module that holds no parameters: casts, keys and amaxes are the product's, the weight is the host's. Without
the wrapper's name (:func:`lightning_lowbit.nn.layers.layer.clean_name`) a product is called ``<host>.<product>``.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_lowbit.nn.core.inputs import refuse_scripts
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.layers.wrapped import follow_class

PRODUCTS = "_products"  # the child of a host that holds its products


class Product(QuantizedLayer):
    """A converted layer whose weight, and bias, are parameters of its host.

    Args:
        host: the module that calls the product.
        weight: name of the host's parameter ``[out_features, in_features]``, or a stack of them; None for a product of
            two activations.
        bias: name of the host's parameter; None for none.
    """

    def __init__(self, host: nn.Module, weight: str | None = None, bias: str | None = None) -> None:
        super().__init__()
        self._of = (host,)  # in a tuple, so that it is no child
        self._names = weight, bias

    @property
    def host(self) -> Any:
        return self._of[0]

    @property
    def size_text(self) -> str:
        """As of any layer; ``activations`` without a weight."""
        return "activations" if self.weight is None else super().size_text

    def kept_input(self, dtype: torch.dtype) -> tuple[int, float]:
        """As of any layer; without a weight nothing is told of it."""
        return (0, torch.finfo(dtype).bits) if self.weight is None else super().kept_input(dtype)

    def own_parameters(self) -> list[nn.Parameter]:
        return [getattr(self.host, name) for name in self._names if name is not None]

    @property
    def weight(self) -> Any:
        name = self._names[0]
        return None if name is None else getattr(self.host, name)

    @property
    def bias(self) -> Tensor | None:
        name = self._names[1]
        return None if name is None else getattr(self.host, name)


class Host(nn.Module):
    """Base class of converted modules that compute by products.

    Attributes:
        called_layers: names of children that this class calls, and the original reads the weights of.
    """

    called_layers: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def make_products(host: Any) -> dict[str, Product]:
        """The products of a module by name, whether it is converted or not; none if it has nothing to quantize."""
        raise NotImplementedError

    @property
    def products(self) -> dict[str, Any]:
        return dict(getattr(self, PRODUCTS).items())

    @staticmethod
    def before_forward(host: Any, args: Any) -> None:
        """Called before each forward pass, with weights as they then are."""

    def product(self, name: str) -> Any:
        return getattr(self, PRODUCTS)[name]

    @property
    def is_plain(self) -> bool:
        """Whether no product has anything to quantize: the host then computes as the class that it was."""
        return has_nothing_to_quantize(self)

    def __prepare_scriptable__(self) -> Any:  # torch.jit.script asks for it
        refuse_scripts(self.name_in_model)

    @property
    def name_in_model(self) -> str:
        """That of the first of the products."""
        return next((str(product.name_in_model) for product in self.products.values()), type(self).__name__)

    @property
    def is_high_precision(self) -> bool:
        """The same of the casts outside any phase."""
        return all(layer.full_casts.plan.is_empty for layer in getattr(self, PRODUCTS).values())


def has_nothing_to_quantize(host: Host) -> bool:
    return all(layer.casts.plan.is_empty for layer in getattr(host, PRODUCTS).values())


def add_products(host: Any, cls: type[Host]) -> None:
    """Converts a module to a class of hosts, in place."""
    if not isinstance(host, Host):
        products = cls.make_products(host)
        follow_class(host)
        host.__class__ = cls
        host.add_module(PRODUCTS, nn.ModuleDict(products))
        if cls.before_forward is not Host.before_forward:
            host.register_forward_pre_hook(cls.before_forward)


def remove_products(host: Any) -> None:
    """Undoes :func:`add_products`, but for the class."""
    delattr(host, PRODUCTS)
    for number in [number for number, hook in host._forward_pre_hooks.items() if hook is type(host).before_forward]:
        del host._forward_pre_hooks[number]
