"""Direct preference optimization (DPO), whose small gradients vanish in fp16 unless the loss is scaled.

    L = -log σ(β [(log π(y|x) - log π_ref(y|x)) - (log π(y'|x) - log π_ref(y'|x))])        mean over pairs

prefers the answer y to y' (arXiv 2305.18290, equation 7; log-probabilities are per token as in Tülu 3, arXiv
2411.15124, section 5). The loss starts at ln 2 with tiny gradients: with respect to a logit at most β/2 over the number
of tokens of all answers y. x is the first half of a sequence of any text, y the second half, and y' is y reversed.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from lightning_lowbit.checks import positive

from ..models import CausalLM


class PreferenceLM(CausalLM):
    """Learns to prefer text to the reversed text, on batches of int64 tokens (batch, length + 1).

    The reference π_ref is a frozen copy of the initial model. Logs ``loss``, ``margin`` (the factor of β, averaged over
    pairs), ``accuracy`` (share of pairs with a positive margin), ``grad_norm`` and ``zero_gradients`` (share of zeros
    in all gradients). In validation it logs ``val_accuracy``, and ``val_loss`` with β = 1, because the loss hardly
    changes if β is small.

    Args:
        beta: β, the weight of the margin, above 0.
        **kwargs: arguments of :class:`CausalLM`.
    """

    def __init__(self, beta: float = 0.1, **kwargs: Any) -> None:
        positive("beta", beta, "what multiplies the margin")
        super().__init__(**kwargs)
        self.beta = beta
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self.val_accuracy = MeanMetric(nan_strategy=math.nan)

    def _networks(self) -> list[nn.Module]:
        return [self.model, self.reference]

    def _margins(self, batch: Tensor) -> Tensor:
        """Returns how much more the model prefers y to y' than the reference does, float32 (batch,)."""
        answer = batch.shape[1] // 2
        mirrored = torch.cat([batch[:, :answer], batch[:, answer:].flip(1)], 1)
        both = torch.cat([batch, mirrored])
        self.reference.eval()  # Lightning has set it to training
        with torch.no_grad():
            before = _log_probability(self.reference, both, answer)
        preferred, other = (_log_probability(self.model, both, answer) - before).chunk(2)
        return preferred - other

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        margins = self._margins(batch)
        loss = -F.logsigmoid(self.beta * margins).mean()
        self.log("loss", loss, prog_bar=True)
        self.log("margin", margins.detach().mean(), prog_bar=True)
        self.log("accuracy", (margins > 0).float().mean())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        margins = self._margins(batch)
        self.val_loss.update(-F.logsigmoid(margins))
        self.val_accuracy.update((margins > 0).float())
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        zeros = torch.stack([(gradient == 0).sum() for gradient in gradients]).sum()
        self.log("zero_gradients", zeros / sum(gradient.numel() for gradient in gradients), prog_bar=True)


def _log_probability(model: Any, tokens: Tensor, answer: int) -> Tensor:
    """Mean log-probability of the tokens from position ``answer`` on, float32 (batch,)."""
    logits = model(input_ids=tokens[:, :-1]).logits[:, answer - 1 :].float()
    return -F.cross_entropy(logits.transpose(1, 2), tokens[:, answer:], reduction="none").mean(1)
