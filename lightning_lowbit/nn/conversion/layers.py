"""Converted layers of a model."""

from torch import nn

from lightning_lowbit.nn.linear import QuantizedLayer


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The converted layers of a model by name, each once, in the order of the modules."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
