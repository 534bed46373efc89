"""Conversion of one module, in place, and back: which modules can be converted, why others cannot, and which have come
and gone."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_lowbit.checks import some
from lightning_lowbit.nn.core.inputs import COMPUTED
from lightning_lowbit.nn.layers.composite import PARTS, CompositeLayer, PartLayer, convert_composite, remove_parts
from lightning_lowbit.nn.layers.known_linears import check_registered
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.layers.multihead import uncalled_projections
from lightning_lowbit.nn.layers.registry import composite_class, converted_class, quantized_class
from lightning_lowbit.nn.layers.state import LayerState
from lightning_lowbit.nn.layers.wrapped import follow_class, replaced_forward
from lightning_lowbit.patterns import clean_name

COMPUTED_WEIGHT = "its weight is computed (torch.nn.utils.parametrize)"
_RESERVED = ("lowbit", "casts", "full_casts", "kind", "keeps_parameter")  # attributes that conversion adds

_Model = TypeVar("_Model", bound=nn.Module)


def is_linear(module: Any) -> bool:
    """Returns whether a module is a linear layer that can be converted, or has been."""
    cls = quantized_class(type(module))
    return cls is not None and cls.kind == "linear"


def convertible(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of a model that can be converted, or have been, by the names of their layers: a module that
    has parts, or would have them, stands under the name of each."""
    modules: dict[str, nn.Module] = {}
    uncalled = uncalled_projections(model)
    for name, module in model.named_modules():
        if module in uncalled or getattr(module, "kind", None) == "attention":  # chosen separately
            continue
        if quantized_class(type(module)) is not None:
            if obstacle(module) is None:
                modules[name] = module
        elif not isinstance(module, CompositeLayer) and (cls := composite_class(type(module))) is not None:
            parts = {} if replaced_forward(module) or odd_parameter(module) else cls.make_parts(module)
            modules |= {f"{name}.{PARTS}.{part}".lstrip("."): module for part in parts}
    return modules


def kind_of(modules: dict[str, nn.Module], name: str) -> str:
    """Returns the kind of the layer of a name that :func:`convertible` returns: that which it has after conversion."""
    module, (_, _, part) = modules[name], name.rpartition(f"{PARTS}.")
    if (cls := quantized_class(type(module))) is not None:
        return cls.kind
    composite = composite_class(type(module))
    assert composite is not None
    return composite.make_parts(module)[part].kind


def obstacle(module: Any) -> str | None:
    """Returns why a module cannot be converted although its class can; None if it can, or has been. Raises a
    ``ValueError`` for one of a class that was registered as linear without a weight of two dimensions."""
    if isinstance(module, (QuantizedLayer, CompositeLayer)):
        return None
    cls = quantized_class(type(module))
    if cls is not None and (reason := cls.obstacle(module)) is not None:
        return reason
    if cls is not None and is_parametrized(module):
        return COMPUTED_WEIGHT
    if without_weight(module):
        return "it has no weight yet"
    if (replacement := replaced_forward(module)) is not None:
        return f"its forward pass was replaced, by {replacement}"
    if (reason := odd_parameter(module)) is not None:
        return reason
    check_registered(module)
    clash = next((name for name in _RESERVED if hasattr(module, name)), None)
    return None if clash is None else f"it has an attribute {clash}, which means something else in converted layers"


def odd_parameter(module: nn.Module) -> str | None:
    """Returns a property of a module's parameters with which no quantized layer computes, such as ``its weight is
    complex64``; None if there is none."""
    is_composite = composite_class(type(module)) is not None
    for name, parameter in module.named_parameters(recurse=is_composite):  # some have the matrices in a child
        for kind, usual in ((parameter.dtype, COMPUTED), (parameter.layout, (torch.strided,))):
            if kind not in usual:
                return f"its {name} is {str(kind).removeprefix('torch.')}"
    return None


def without_weight(module: nn.Module) -> bool:
    """Returns whether a lazy module waits for its first batch."""
    return any(is_lazy(parameter) for parameter in module.parameters(recurse=False))


def convert_layer(model: nn.Module, name: str) -> Any:
    """Converts the layer of a name that :func:`convertible` returns, in place, and returns it."""
    path, _, part = name.rpartition(f"{PARTS}.")
    if part != name:
        module: Any = model.get_submodule(path.rstrip("."))
        convert_composite(module, composite_class(type(module)))  # type: ignore[arg-type]
        layer: Any = module.part(part)
        layer.lowbit.name_in_model = clean_name(name)
        return layer
    layer = model.get_submodule(name)
    if not isinstance(layer, QuantizedLayer):
        follow_class(layer)
        layer.__class__ = quantized_class(type(layer))
        layer.lowbit = LayerState()
    layer.lowbit.name_in_model = clean_name(name) or f"{type(layer).__name__} {tuple(layer.weight.shape)}"
    path, _, child = name.rpartition(".")
    parent: Any = model.get_submodule(path)
    caller = composite_class(type(parent))
    if caller is not None and child in caller.called_children:
        convert_composite(parent, caller)
    return layer


def restore_classes(model: _Model) -> _Model:
    """Gives converted modules their classes back, in place; their weights stay as they are. Returns the model."""
    for module in list(model.modules()):
        if isinstance(module, CompositeLayer):
            remove_parts(module)
        elif isinstance(module, QuantizedLayer) and not isinstance(module, PartLayer):
            del module.lowbit
        else:
            continue
        module.__class__ = type(module).__bases__[1]
    return model


class Inventory:
    """The layers of a model at a moment, converted or not (hosts' products, not hosts), to tell changes later."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[str, weakref.ref[nn.Module]] = {}
        self.take(model)

    def added(self, model: nn.Module) -> dict[str, nn.Module]:
        """Returns the layers that are new since the last time, by name."""
        known = {id(layer()) for layer in self._layers.values()}
        return {name: module for name, module in _present(model).items() if id(module) not in known}

    def take(self, model: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
        """Notes the layers, and returns :meth:`added` and the names of lost ones."""
        now, new = _present(model), self.added(model)
        present = {id(module) for module in now.values()}
        lost = [name for name, layer in self._layers.items() if id(layer()) not in present]
        self._layers = {name: weakref.ref(module) for name, module in now.items()}
        return new, lost


def _present(model: nn.Module) -> dict[str, nn.Module]:
    modules = [(name, module) for name, module in model.named_modules() if not isinstance(module, CompositeLayer)]
    return {clean_name(name): module for name, module in modules if converted_class(module.__class__) is not None}


def described(added: Mapping[str, nn.Module], removed: Sequence[str]) -> str:
    """Returns what :meth:`Inventory.take` returns in words; ``""`` if nothing has changed."""
    copies = [name for name, module in added.items() if isinstance(module, QuantizedLayer)]
    parts = {
        "in high precision until the next fit converts them": [name for name in added if name not in copies],
        "copies, which keep their casts and phase, and which no histories and random bits renew": copies,
        "gone": removed,
    }
    return "; ".join(f"{some(names)} ({what})" for what, names in parts.items() if names)
