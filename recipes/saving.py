"""Restores the casts of the training with a model, and refuses saves that would lose them."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_lowbit._lightning import rank_zero_warn
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.precision import restore
from lightning_lowbit.precision.checkpoints.files import state_of
from lightning_lowbit.precision.checkpoints.trained import LACKING


def restore_casts(model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Restores the casts of a checkpoint, if any; leaves weights and mode alone. Raises a ``ValueError`` if damaged."""
    state = state_of(checkpoint)
    if state is None:
        return
    if state.get("trained") is None:
        rank_zero_warn(
            f"The checkpoint holds {LACKING}: the model computes in high precision. Convert it as it was trained, e.g. "
            "lightning_lowbit.convert(model, 'nvfp4', skip=['lm_head'])."
        )
        return
    mode = model.training
    restore(model, checkpoint, weights=False).train(mode)


class SavePretrained:
    """``save_pretrained`` of a ``transformers`` model that refuses to write latent weights.

    In quantization-aware training the optimizer updates latent weights, and the forward pass quantizes them. Loaded
    without the casts, latent weights give other results.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, latent: bool = False, **kwargs: Any) -> Any:
        """Calls ``save_pretrained`` of the model's class.

        Raises:
            ValueError: layers were trained quantization-aware, and ``latent`` is False.
        """
        layers = {name: m for name, m in self.model.named_modules() if isinstance(m, QuantizedLayer)}
        aware = [name for name, layer in layers.items() if is_quantization_aware(layer)]
        if aware and not latent:
            raise ValueError(
                f"{len(aware)} layers, e.g. {aware[0]} ({layers[aware[0]].casts}), were trained to compute with "
                "quantized weights, and save_pretrained would write the latent ones, which compute something else. To "
                "evaluate, load the checkpoint: CausalLM.load_from_checkpoint, or lightning_lowbit.restore. Where only "
                "weights are quantized, call lightning_lowbit.bake(model) first. To train on from the latent weights, "
                "give latent=True."
            )
        return type(self.model).save_pretrained(self.model, *args, **kwargs)


def is_quantization_aware(layer: QuantizedLayer) -> bool:
    """Tells whether a layer quantizes its weight in the forward pass, but no gradient in the backward pass."""
    casts = layer.casts
    return casts.fprop_w is not None and casts.dgrad_g is None and casts.wgrad_g is None
