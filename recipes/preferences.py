"""Direct preference optimization (DPO): a loss whose gradients are small, and vanish in fp16 unless it is scaled.

    L = -log σ(β [(log π(y|x) - log π_ref(y|x)) - (log π(y'|x) - log π_ref(y'|x))])        mean over pairs

prefers the answer y to y' (arXiv 2305.18290, equation 7; here with log-probabilities per token, as in Tülu 3, arXiv
2411.15124, section 5). It begins at ln 2, whatever the model, and yet its gradients are tiny: as it begins, that with
respect to a logit is at most β/2 over the number of tokens of all answers y.

Pairs come from any text. The first half of a sequence is x, the second half y, and y' is y backwards: the same tokens,
in an order that nobody would write.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from lightning_lowbit.checks import is_number

from .models import CausalLM


class PreferenceLM(CausalLM):
    """Learns to prefer text to the same text backwards, on batches of int64 tokens (batch, length + 1).

    The reference π_ref is the model as it begins, a frozen copy. Logs ``loss``, ``margin`` (what β multiplies, the mean
    over pairs), ``accuracy`` (share of pairs in which it is above 0), ``grad_norm`` and ``zero_gradients`` (share of
    the elements of all gradients that are 0); and of the validation text ``val_accuracy`` and ``val_loss``, which is
    the loss with β = 1: with a small β it hardly moves.

    Args:
        beta: β, how far the model may go from the reference.
        **kwargs: those of :class:`CausalLM`.

    Raises:
        ValueError: β is no number above 0; or as in :class:`CausalLM`.
    """

    def __init__(self, beta: float = 0.1, **kwargs: Any) -> None:
        if not is_number(beta) or not 0 < beta < math.inf:
            raise ValueError(f"beta is what multiplies the margin, a number above 0; got {beta!r}.")
        super().__init__(**kwargs)
        self.beta = beta
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self.val_accuracy = MeanMetric(nan_strategy=math.nan)

    def _margins(self, batch: Tensor) -> Tensor:
        """By how much more than the reference the model prefers each sequence to its mirror image, float32 (batch,)."""
        answer = batch.shape[1] // 2
        mirrored = torch.cat([batch[:, :answer], batch[:, answer:].flip(1)], 1)
        both = torch.cat([batch, mirrored])
        self.reference.eval()  # which Lightning puts into training, with all else
        with torch.no_grad():
            before = _log_probability(self.reference, both, answer)
        preferred, other = (_log_probability(self.model, both, answer) - before).chunk(2)
        return preferred - other

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """One micro-batch."""
        margins = self._margins(batch)
        loss = -F.logsigmoid(self.beta * margins).mean()
        self.log("loss", loss, prog_bar=True)
        self.log("margin", margins.detach().mean(), prog_bar=True)
        self.log("accuracy", (margins > 0).float().mean())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Adds one batch to the means."""
        margins = self._margins(batch)
        self.val_loss.update(-F.logsigmoid(margins))
        self.val_accuracy.update((margins > 0).float())
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Logs how many gradients are 0, besides their norm."""
        super().on_before_optimizer_step(optimizer)
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        zeros = torch.stack([(gradient == 0).sum() for gradient in gradients]).sum()
        self.log("zero_gradients", zeros / sum(gradient.numel() for gradient in gradients), prog_bar=True)


def _log_probability(model: Any, tokens: Tensor, answer: int) -> Tensor:
    """Mean log-probability of the tokens from position ``answer`` on, float32 (batch,)."""
    logits = model(input_ids=tokens[:, :-1]).logits[:, answer - 1 :].float()
    return -F.cross_entropy(logits.transpose(1, 2), tokens[:, answer:], reduction="none").mean(1)
