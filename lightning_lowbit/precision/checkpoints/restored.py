"""Restores a plain model that computes as it did in training, without a Trainer."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_lowbit.nn.conversion.context import ForwardContext
from lightning_lowbit.precision.base import LowBitPrecision
from lightning_lowbit.precision.checkpoints.files import Checkpoint, load_checkpoint
from lightning_lowbit.precision.checkpoints.trained import Trained
from lightning_lowbit.precision.checkpoints.weights import load_weights

_Model = TypeVar("_Model", bound=nn.Module)


def restore(
    model: _Model, checkpoint: Checkpoint, *, prefix: str = "", weights: bool = True, weights_only: bool = True
) -> _Model:
    """Makes a plain model compute as it was trained, in place: weights, casts, phase, λ, amaxes and autocast.

    The model is put in evaluation mode. Only its forward passes run under autocast; for code outside them, use
    ``torch.autocast``. Returns the same model.

    Args:
        model: built as for training, with weights in the dtype of the checkpoint's, not sharded.
        checkpoint: a path to a file or a folder of shards, or what ``torch.load`` returned.
        prefix: the model's name within the trained module, if it is a submodule, e.g. ``"model"``.
        weights: False if the weights are already loaded.
        weights_only: as in ``torch.load``; False loads any object, for trusted files only.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: the checkpoint has no record of its training, is damaged, or lacks a weight of the model, or has it
            in another shape or dtype.

    Examples:
        >>> model = restore(MyModule(), "last.ckpt")
        >>> logits = model(tokens)
    """
    loaded = load_checkpoint(checkpoint, weights_only)
    plugin = LowBitPrecision.from_checkpoint(loaded)
    if plugin.backend == "native":  # would raise on other hardware; emulation gives the same results
        plugin.backend = "auto"
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        advice = "Use a Trainer with plugins=[LowBitPrecision.from_checkpoint(path)] for one that is"
        raise ValueError(f"restore takes a model that is not spread over processes. {advice}.")
    root = _within(model, prefix)
    planned = plugin.plan(root)
    if weights:
        load_weights(root, loaded if "state_dict" in loaded else checkpoint, weights_only)
    plugin.attach(root, planned)
    ForwardContext(_AsTrained(plugin, plugin.trained)).attach(model)
    return model.eval()


class _AsTrained:
    def __init__(self, plugin: LowBitPrecision, trained: Trained) -> None:
        self.plugin, self.trained = plugin, trained

    @contextmanager
    def __call__(self, module: nn.Module) -> Generator[None, None, None]:
        if module.training and torch.is_grad_enabled():
            raise ValueError(
                "A restored model only evaluates. Call model.eval(); or train it with "
                "Trainer(plugins=[LowBitPrecision.from_checkpoint(path)]) and fit(model, ckpt_path=path); or in high "
                "precision, after convert(model, 'bf16')."
            )
        self.plugin.move_to(next(module.parameters()).device)
        with self.plugin.forward_context():
            yield


def _within(model: nn.Module, prefix: str) -> nn.Module:
    for name in reversed(prefix.split(".") if prefix else []):
        holder = nn.Module()
        holder.add_module(name, model)
        model = holder
    return model
