"""Modules with several matrix products, or with one beside other things, such as a stack of experts.

A composite module keeps its parameters, their names and its place in the model. Each of its products is a converted
layer, a *part*: a child of a module that holds no parameters. Casts, keys and amaxes are the part's, the weight is the
composite's. A part is called ``<composite>.<part>``, without the name of the child that holds the parts
(:func:`lightning_lowbit.nn.layers.layer.clean_name`).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_lowbit._torch import hooks_of, remove_hook
from lightning_lowbit.nn.core.inputs import refuse_scripts
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.layers.wrapped import follow_class

PARTS = "_products"  # the child of a composite module that holds its parts


class PartLayer(QuantizedLayer):
    """A converted layer whose weight and bias are parameters of a composite module.

    Args:
        owner: the module that calls the part.
        weight: name of the owner's parameter ``[out_features, in_features]``, or a stack of them; None for a product of
            two activations.
        bias: name of the owner's parameter; None for none.
    """

    def __init__(self, owner: nn.Module, weight: str | None = None, bias: str | None = None) -> None:
        super().__init__()
        self._of = (owner,)  # in a tuple, so that it is no child
        self._names = weight, bias

    @property
    def owner(self) -> Any:
        return self._of[0]

    @property
    def size_text(self) -> str:
        return "activations" if self.weight is None else super().size_text

    def saved_input(self, dtype: torch.dtype) -> tuple[int, float]:
        return (0, torch.finfo(dtype).bits) if self.weight is None else super().saved_input(dtype)

    def own_parameters(self) -> list[nn.Parameter]:
        return [getattr(self.owner, name) for name in self._names if name is not None]

    @property
    def weight(self) -> Any:
        name = self._names[0]
        return None if name is None else getattr(self.owner, name)

    @property
    def bias(self) -> Tensor | None:
        name = self._names[1]
        return None if name is None else getattr(self.owner, name)


class CompositeLayer(nn.Module):
    """Base class of converted modules that compute by parts."""

    # Names of children that this class calls, while the original class reads their weights.
    called_children: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def make_parts(module: Any) -> dict[str, PartLayer]:
        """Makes the parts of a module, converted or not, by name; none if it has nothing to quantize."""
        raise NotImplementedError

    @staticmethod
    def before_forward(module: Any, args: Any) -> None:
        """Called before each forward pass, with weights as they then are."""

    @property
    def parts(self) -> dict[str, Any]:
        return dict(getattr(self, PARTS).items())

    def part(self, name: str) -> Any:
        return getattr(self, PARTS)[name]

    @property
    def is_plain(self) -> bool:
        """True if no part has anything to quantize: the module then computes as its original class."""
        return has_plain_parts(self)

    @property
    def is_high_precision(self) -> bool:
        """:attr:`is_plain` outside any phase."""
        return all(layer.full_casts.traits.is_empty for layer in getattr(self, PARTS).values())

    @property
    def name_in_model(self) -> str:
        return next((str(part.name_in_model) for part in self.parts.values()), type(self).__name__)

    def __prepare_scriptable__(self) -> Any:  # torch.jit.script asks for it
        refuse_scripts(self.name_in_model)


def has_plain_parts(module: CompositeLayer) -> bool:
    return all(layer.lowbit.casts.traits.is_empty for layer in getattr(module, PARTS).values())


def convert_composite(module: Any, cls: type[CompositeLayer]) -> None:
    """Converts a module to a composite class, in place, unless it has been converted."""
    if not isinstance(module, CompositeLayer):
        parts = cls.make_parts(module)
        follow_class(module)
        module.__class__ = cls
        module.add_module(PARTS, nn.ModuleDict(parts))
        if cls.before_forward is not CompositeLayer.before_forward:
            module.register_forward_pre_hook(cls.before_forward)


def remove_parts(module: Any) -> None:
    """Undoes :func:`convert_composite`, except for the class."""
    delattr(module, PARTS)
    before, _ = hooks_of(module)
    for number in [number for number, hook in before.items() if hook is type(module).before_forward]:
        remove_hook(module, number)
