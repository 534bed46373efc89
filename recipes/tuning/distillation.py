"""Quantization-aware distillation (QAD): a model in few bits learns the distributions of the model that it was.

    L = Σ p(t) [log p(t) - log q(t)]        over the vocabulary, mean over tokens; p of the teacher, q of the student

There are no labels in it: the student recovers what quantization cost, and does not learn the text (arXiv 2601.20088).
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_lowbit.nn import QuantizedLayer

from ..models import CausalLM


class DistillationLM(CausalLM):
    """Learns the distributions of its own pretrained weights, on batches of int64 tokens (batch, length + 1).

    The teacher is a frozen copy of the initial model: leave it in high precision by ``skip=["teacher", ...]`` of the
    plugin. Logs ``loss`` (the divergence, in nats per token) and ``grad_norm``; in validation ``val_divergence``, and
    ``val_loss`` and ``val_perplexity`` of the text, as :class:`CausalLM` does.

    Args:
        network: a folder with ``config.json`` and weights, a model's name on the Hugging Face Hub, or a network that
            starts from random weights, for trials.
        pretrained: whether to load the weights at ``network``.
        **kwargs: those of :class:`CausalLM`.

    Raises:
        ValueError: (before training) a layer of the teacher is quantized; or as :class:`CausalLM` raises.
    """

    def __init__(self, network: str, pretrained: bool = True, **kwargs: Any) -> None:
        super().__init__(network=network, pretrained=pretrained, **kwargs)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.val_divergence = MeanMetric(nan_strategy=math.nan)

    def _networks(self) -> list[nn.Module]:
        return [self.model, self.teacher]

    def on_fit_start(self) -> None:
        layers = [name for name, layer in self.teacher.named_modules() if isinstance(layer, QuantizedLayer)]
        if layers:
            raise ValueError(
                f"The teacher computes in high precision, and {len(layers)} of its layers are quantized, e.g. "
                f"teacher.{layers[0]}: add 'teacher' to the plugin's skip."
            )

    def _divergence(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Divergence from the teacher in nats per token, float32, and the student's logits (batch, length, vocab)."""
        tokens = batch[:, :-1]
        self.teacher.eval()  # Lightning has set it to training
        with torch.no_grad():
            target = self.teacher(input_ids=tokens).logits.float().log_softmax(-1)
        logits = self(tokens)
        total = F.kl_div(logits.float().log_softmax(-1), target, reduction="sum", log_target=True)
        return total / tokens.numel(), logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss, _ = self._divergence(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        divergence, logits = self._divergence(batch)
        self._validate(logits, batch)
        self.val_divergence.update(divergence, batch[:, 1:].numel())
        self.log("val_divergence", self.val_divergence, prog_bar=True)
