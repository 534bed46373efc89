"""The layers of a model that have come and gone."""

import weakref
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_lowbit.checks import some
from lightning_lowbit.nn.layers.composite import CompositeLayer
from lightning_lowbit.nn.layers.layer import QuantizedLayer, clean_name
from lightning_lowbit.nn.layers.registry import converted_class


class Inventory:
    """The layers of a model at a moment, converted or not (hosts' products, not hosts), to tell changes later."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[str, weakref.ref[nn.Module]] = {}
        self.take(model)

    def take(self, model: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
        """Notes the layers, and returns the new ones since the last time, by name, and the names of lost ones."""
        modules = [(name, module) for name, module in model.named_modules() if not isinstance(module, CompositeLayer)]
        now = {clean_name(name): module for name, module in modules if converted_class(module.__class__) is not None}
        before = {name: layer() for name, layer in self._layers.items()}
        self._layers = {name: weakref.ref(module) for name, module in now.items()}
        known, present = {id(one) for one in before.values()}, {id(module) for module in now.values()}
        new = {name: module for name, module in now.items() if id(module) not in known}
        return new, [name for name, one in before.items() if id(one) not in present]


def described(added: Mapping[str, nn.Module], removed: Sequence[str]) -> str:
    """Returns what :meth:`Inventory.take` returns in words; ``""`` if nothing has changed."""
    copies = [name for name, module in added.items() if isinstance(module, QuantizedLayer)]
    parts = {
        "in high precision until the next fit converts them": [name for name in added if name not in copies],
        "copies, which keep their casts and phase, and which no histories and random bits renew": copies,
        "gone": removed,
    }
    return "; ".join(f"{some(names)} ({what})" for what, names in parts.items() if names)
