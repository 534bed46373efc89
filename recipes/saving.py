"""Models that are loaded as they were trained, and saved so that what is loaded elsewhere computes the same."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_lowbit._lightning import rank_zero_warn
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.precision import restore
from lightning_lowbit.precision.checkpoints.files import state_of
from lightning_lowbit.precision.checkpoints.trained import LACKING


def restore_casts(model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Restores the casts of a checkpoint, if it was trained with any; weights and mode are left to who loads them.

    Raises:
        ValueError: its state is damaged.
    """
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
    """``save_pretrained`` of a ``transformers`` model, which refuses to write weights that mean nothing without casts.

    In quantization-aware training the optimizer moves latent weights, and the forward pass computes with what casts
    make of them. Loaded elsewhere, without the casts, latent weights compute something else.

    Args:
        model: whose.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, latent: bool = False, **kwargs: Any) -> Any:
        """As the model's class does it.

        Args:
            *args, **kwargs: as there.
            latent: writes the weights as the optimizer has them, whatever the forward pass makes of them.

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
    """Whether a layer quantizes its weight in the forward pass, and no gradient in the backward pass."""
    casts = layer.casts
    return casts.fprop_w is not None and casts.dgrad_g is None and casts.wgrad_g is None
