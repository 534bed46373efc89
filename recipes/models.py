"""A causal language model of the LLaMA kind, small enough for a laptop.

The network is ``transformers.LlamaForCausalLM``, built from plain numbers, so a YAML file describes it whole.
What belongs to low precision (which layers compute in four bits, which optimizer keeps that stable) comes from
outside: the precision plugin, and the ``optimizer`` and ``scheduler`` given as callables that wait for their
parameters.
"""

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_lowbit.precision.base import global_seed


class WarmupCosine(LambdaLR):
    """Raises the learning rate linearly over ``warmup_steps``, then lowers it along half a cosine.

    The first step has 1 / warmup_steps of the learning rate, not zero; from step ``total_steps`` on it stays at
    ``final_fraction`` of it.

    Args:
        optimizer: its learning rates are the peak.
        warmup_steps: optimizer steps until the peak; 0 starts there.
        total_steps: optimizer steps of the whole run; with None, :class:`CausalLM` fills in those of its Trainer.
        final_fraction: last learning rate over the peak.

    Raises:
        ValueError: the warm-up is negative or leaves no step to the cosine.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int, total_steps: int | None = None, final_fraction: float = 0.1
    ) -> None:
        self.warmup_steps, self.final_fraction = warmup_steps, final_fraction
        self.set_total_steps(math.inf if total_steps is None else total_steps)
        super().__init__(optimizer, self._factor)

    def state_dict(self) -> dict[str, Any]:
        """The position; the shape is that of this run's configuration, also after a resume."""
        shape = ("warmup_steps", "final_fraction", "total_steps")
        return {name: value for name, value in super().state_dict().items() if name not in shape}

    def set_total_steps(self, total_steps: float) -> None:
        """Sets the length of the run; raises as the constructor does."""
        if not 0 <= self.warmup_steps < total_steps:
            raise ValueError(
                f"warmup_steps must be at least 0 and less than the {total_steps} steps of the run; got "
                f"{self.warmup_steps}. Warm up for fewer steps."
            )
        self.total_steps = total_steps

    def _factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.final_fraction + (1 - self.final_fraction) * (1 + math.cos(math.pi * progress)) / 2


class Perplexity(MeanMetric):
    """exp of the mean loss, over all tokens and ranks: not the mean of the batches' perplexities."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class CausalLM(LightningModule):
    """Next-token prediction on batches of int64 tokens (batch, length + 1).

    The defaults have 3.3 million parameters, and each matrix dimension is a multiple of 64, so that no block of
    any number format needs padding. Logs ``loss``, ``grad_norm`` (global L2, before clipping; parameters sharded
    over devices are not gathered), ``tokens/s`` (of one process), ``val_loss`` (mean over tokens) and
    ``val_perplexity``.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated feed-forward layer, about 8/3 of ``hidden_size``.
        num_hidden_layers: transformer blocks.
        num_attention_heads: attention heads, a divisor of ``hidden_size``.
        max_position_embeddings: longest sequence the model is meant for; rotary, so it costs no parameters.
        tie_word_embeddings: makes the output layer share the embedding's matrix; then it cannot be quantised
            apart from it.
        attention_dropout: share of attention weights set to zero in training.
        gradient_checkpointing: computes activations twice instead of keeping them.
        seed: draws the initial weights, whatever the state of the global random generator; None takes that of
            ``seed_everything``, or 0.
        optimizer: makes the optimizer from the parameters; in YAML a ``class_path`` with ``init_args``.
        scheduler: makes the learning-rate schedule, stepped once per optimizer step; None for a constant rate.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 256,
        intermediate_size: int = 704,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        max_position_embeddings: int = 1024,
        tie_word_embeddings: bool = False,
        attention_dropout: float = 0.0,
        gradient_checkpointing: bool = False,
        seed: int | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        # Classes and functions do not belong in a checkpoint, which must load with `weights_only=True`.
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=tie_word_embeddings,
            attention_dropout=attention_dropout,
            attn_implementation="sdpa",  # type: ignore[call-arg]
            use_cache=False,
            bos_token_id=0,  # the byte between documents
            eos_token_id=0,
        )
        # On the CPU: `torch.manual_seed` would also touch the generators of all accelerators.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(global_seed() if seed is None else seed)
            self.model = LlamaForCausalLM(config)
        if gradient_checkpointing:
            self.model.activation_checkpointing_enable()
        # A loss that is not a number shall show, not be left out of the mean, so NaN stands in for NaN ("disable"
        # would do the same, but in torchmetrics 1.9 it disables the weights too).
        self.val_loss = MeanMetric(nan_strategy=math.nan)
        self.val_perplexity = Perplexity(nan_strategy=math.nan)
        self._tokens, self._since = 0, time.perf_counter()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocab_size) of the token after each of ``tokens`` (batch, length)."""
        return self.model(input_ids=tokens).logits

    def _loss(self, batch: Tensor) -> Tensor:
        """Mean cross entropy of the tokens 1 … length, float32 whatever the layers compute in."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """One micro-batch."""
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Adds one batch to the means, weighted by its tokens: the last batch may be smaller."""
        loss, tokens = self._loss(batch), batch[:, 1:].numel()
        self.val_loss.update(loss, tokens)
        self.val_perplexity.update(loss, tokens)
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Logs the gradient norm as a tensor on the device: nobody waits for it until it is shown."""
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.log("grad_norm", torch.nn.utils.get_total_norm(gradients), prog_bar=True)

    def on_train_start(self) -> None:
        """Starts the clock of ``tokens/s``."""
        self._tokens, self._since = 0, time.perf_counter()

    def on_validation_end(self) -> None:
        """Restarts the clock of ``tokens/s``: validation is not training time."""
        self._tokens, self._since = 0, time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        """Logs ``tokens/s`` over the batches since it last did, as often as the logger writes.

        The host only enqueues work, but it cannot run ahead by much: over a logging interval its time is the
        device's, and no synchronisation is needed.
        """
        self._tokens += batch[:, 1:].numel()
        interval = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if interval and (batch_idx + 1) % interval == 0:
            rate = self._tokens / (time.perf_counter() - self._since)
            # A tensor on the host: a float would be copied to the device, which waits for it.
            self.log("tokens/s", torch.tensor(rate), prog_bar=True)
            self._tokens, self._since = 0, time.perf_counter()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer and, where one is given, the schedule, per optimizer step."""
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer)
        if isinstance(scheduler, WarmupCosine) and scheduler.total_steps == math.inf:
            if self.trainer.estimated_stepping_batches == math.inf:
                raise ValueError("WarmupCosine needs the length of the run: set max_steps, max_epochs or total_steps.")
            scheduler.set_total_steps(self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
