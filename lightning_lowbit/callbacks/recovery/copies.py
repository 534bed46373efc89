"""Copies of weights outside the model's parameters, such as an average or a teacher."""

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowbit._lightning import Trainer


def copies_of_weights(trainer: Trainer) -> dict[str, list[Tensor]]:
    """Tensors of the copies that callbacks and the LightningModule hold in attributes, by the attribute.

    A copy is a module, also in a list, tuple or dict (``WeightAveraging`` has one); or a list, tuple or dict of tensors
    with the shapes of all parameters, or of all that are trained. What is the model's own is left out.

    Examples:
        >>> copies_of_weights(Trainer(callbacks=[EMAWeightAveraging()])).keys()
        dict_keys(['EMAWeightAveraging._average_model'])
    """
    model = trainer.lightning_module
    own = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
    shapes = [
        [parameter.shape for parameter in model.parameters()],
        [parameter.shape for parameter in model.parameters() if parameter.requires_grad],
    ]
    copies: dict[str, list[Tensor]] = {}
    for holder in (model, *trainer.callbacks):  # type: ignore[attr-defined]
        for name, value in vars(holder).items():
            tensors = [tensor for tensor in _tensors(value, shapes) if id(tensor) not in own]
            if tensors:
                place = f"{type(holder).__name__}.{name}"
                copies.setdefault(place, []).extend(tensors)  # two callbacks may be of one class
    return copies


def _tensors(value: Any, shapes: Collection[list[torch.Size]]) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from chain(value.parameters(), value.buffers())
        return
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, list | tuple):  # others may read their items from a disk
        return
    if value and all(isinstance(item, Tensor) for item in value):
        yield from value if [item.shape for item in value] in shapes else ()
        return
    for item in value:
        if isinstance(item, nn.Module):
            yield from _tensors(item, shapes)
