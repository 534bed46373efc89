"""Restores a plain model that computes as it did in training, without a Trainer."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_lowbit._lightning import LightningModule, is_overridden
from lightning_lowbit.nn.conversion.context import ForwardContext
from lightning_lowbit.nn.conversion.convert import plan_by_name
from lightning_lowbit.nn.conversion.shared_amax import check_groups
from lightning_lowbit.precision.checkpoints.files import Checkpoint, load_checkpoint, load_weights
from lightning_lowbit.precision.checkpoints.trained import Origin, Trained
from lightning_lowbit.precision.layers import RunLayers
from lightning_lowbit.precision.run_settings import COMPUTE_DTYPES

_Model = TypeVar("_Model", bound=nn.Module)


def restore(
    model: _Model, checkpoint: Checkpoint, *, prefix: str = "", weights: bool = True, weights_only: bool = True
) -> _Model:
    """Makes a plain model compute as it was trained, in place: weights, casts, phase, λ, amaxes and autocast.

    The model is put in evaluation mode. Only its forward passes run under autocast; for code outside them, use
    ``torch.autocast``. Returns the same model.

    Args:
        model: built as for training, with weights in the dtype of the checkpoint's, not sharded.
        checkpoint: a path to a file or a folder of shards, or the result of ``torch.load``. A ``LightningModule`` gets
            it in ``on_load_checkpoint``, after ``configure_model``.
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
    if weights:
        loaded = run_hooks(model, loaded)
    origin = Origin.read(loaded)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        advice = "Use a Trainer with plugins=[LowBitPrecision.from_checkpoint(path)] for one that is"
        raise ValueError(f"restore takes a model that is not spread over processes. {advice}.")
    trained = replace(origin.trained, outputs=())
    if trained.backend == "native":  # would raise on other hardware; emulation gives the same results
        trained = replace(trained, backend="auto")
    settings = {name: getattr(trained, name) for name in ("exact", "backend", "smooth_swiglu", "shared_amax")}
    layers = RunLayers(origin.state["seed"], **settings)
    root = _within(model, prefix)
    planned = plan_by_name(root, trained.planned)
    if trained.shared_amax:
        check_groups(planned, trained.shared_amax)
    if weights:
        load_weights(root, loaded if "state_dict" in loaded else checkpoint, weights_only)
    layers.expect(root)
    layers.convert(root, planned, COMPUTE_DTYPES[trained.compute_dtype][1])
    layers.load_casts(origin.state)
    # Amaxes of averaged weights are those of other weights.
    layers.load_state_dict(origin.state, histories=not origin.state.get("averaged", False))
    if layers.histories is not None:
        layers.histories.release()
    ForwardContext(_AsTrained(layers, trained)).attach(model)
    return model.eval()


def run_hooks(module: nn.Module, loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lets a ``LightningModule`` make its layers and read a copy of a checkpoint; returns what it leaves of this."""
    if not isinstance(module, LightningModule):
        return loaded
    if is_overridden("configure_model", module):
        module.configure_model()
    state = loaded.get("state_dict")
    checkpoint = {**loaded, **({"state_dict": dict(state)} if isinstance(state, Mapping) else {})}
    module.on_load_checkpoint(checkpoint)
    return checkpoint


class _AsTrained:
    def __init__(self, layers: RunLayers, trained: Trained) -> None:
        self.layers, self.trained = layers, trained
        self._dtype = COMPUTE_DTYPES[trained.compute_dtype][1]

    @contextmanager
    def __call__(self, module: nn.Module) -> Generator[None, None, None]:
        if module.training and torch.is_grad_enabled():
            raise ValueError(
                "A restored model only evaluates. Call model.eval(); or train it with "
                "Trainer(plugins=[LowBitPrecision.from_checkpoint(path)]) and fit(model, ckpt_path=path); or in high "
                "precision, after convert(model, 'bf16')."
            )
        self.layers.device = next(module.parameters()).device
        with self.layers.forward_context(self._dtype):
            yield


def _within(model: nn.Module, prefix: str) -> nn.Module:
    for name in reversed(prefix.split(".") if prefix else []):
        holder = nn.Module()
        holder.add_module(name, model)
        model = holder
    return model
