"""Deliberate spikes, to test optimizers and callbacks.

Stable-SPAM's paper finds such spikes in four-bit training (arXiv 2502.17055, section 2), and SPAM's in all training of
language models (arXiv 2501.06842, section 2), where they are rare and models are large.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from lightning_lowbit._lightning import Callback, LightningModule, Trainer
from lightning_lowbit.checks import choose, integer, number
from lightning_lowbit.distributed import local
from lightning_lowbit.precision.run_settings import global_seed
from lightning_lowbit.quant.rounding import mix_key


class GradientSpikes(Callback):
    """Multiplies some elements of all gradients in random steps, before they are clipped.

    Steps and elements depend only on the seed and the step: they are the same for every optimizer, after a resume, and
    sharded or not (except under FSDP1, which cuts flattened parameters). Each of several optimizers has its own steps.
    Logs ``gradient_spike``: 1 in such a step, else 0; of several optimizer steps in a training step, that of the last.
    It goes before all other callbacks of the Trainer, so that monitors see the spikes wherever they are listed.

    Args:
        probability: of a spike in a step.
        factor: of the elements.
        share: of the elements of each gradient to multiply; 1 is the whole gradient.
        seed: 0 to 2^32 - 1; None takes that of ``seed_everything``, or 0.

    Raises:
        ValueError: a probability or share outside [0, 1], or an invalid factor or seed.
    """

    def __init__(
        self, probability: float = 0.01, factor: float = 1000.0, share: float = 1.0, seed: int | None = None
    ) -> None:
        self.probability = number("probability", probability, at_least=0, at_most=1)
        self.share = number("share", share, at_least=0, at_most=1)
        self.factor = number("factor", factor, finite=False)
        self.seed = integer("seed", seed, 0, at_most=2**32 - 1, or_none=True)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sorts the Trainer's callbacks: those that multiply gradients, then the others."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        # A new list: Lightning goes through the old one now.
        trainer.callbacks = sorted(callbacks, key=lambda callback: not isinstance(callback, GradientSpikes))  # type: ignore[attr-defined]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        seed = torch.tensor(global_seed() if self.seed is None else self.seed)
        mixed = int(mix_key((seed << 32) + trainer.global_step))
        generator = torch.Generator().manual_seed(mixed % 2**32)  # which ignores more bits
        drawn = torch.rand((), generator=generator).item() < self.probability
        pl_module.log("gradient_spike", float(drawn))
        if drawn:
            optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for parameter in pl_module.parameters():  # not in the order of the optimizer
                gradient: Any = parameter.grad
                if gradient is not None and id(parameter) in optimized:
                    hit = torch.rand(gradient.shape, generator=generator) < self.share
                    local(gradient)[_spread_as(gradient, hit).to(gradient.device)] *= self.factor


class CorruptBatches(Callback):
    """Corrupts the batches of some optimizer steps.

    Args:
        steps: optimizer steps, counted from 0 like ``global_step``.
        kind: ``"noise"`` draws new tokens uniformly from 0 to the largest of the batch; ``"shuffle"`` permutes them;
            ``"nan"`` makes the output of the last linear layer NaN, and with it the loss and all gradients.

    Raises:
        ValueError: a step is not an integer from 0 on, or there is no such kind; or, in such a step, the batch is not a
            tensor of integers.
    """

    def __init__(self, steps: Sequence[int], kind: str = "noise") -> None:
        if not steps or not all(type(step) is int and step >= 0 for step in steps):
            raise ValueError(f"steps are optimizer steps, such as [150]; got {steps!r}.")
        self.steps, self.kind = list(steps), choose("kind of corruption", kind, ("noise", "shuffle", "nan"))
        self._hook: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step not in self.steps:
            return
        if self.kind == "nan":
            *_, last = (module for module in pl_module.modules() if isinstance(module, nn.Linear))
            self._hook = last.register_forward_hook(lambda module, inputs, output: output * torch.nan)
        elif not isinstance(batch, Tensor) or batch.is_floating_point():
            raise ValueError(f"CorruptBatches(kind={self.kind!r}) takes a batch of integers; got {type(batch)}.")
        else:
            generator = torch.Generator().manual_seed(trainer.global_step)
            if self.kind == "shuffle":
                order = torch.randperm(batch.numel(), generator=generator).to(batch.device)
                batch.copy_(batch.flatten()[order].view_as(batch))
            else:
                uniform = torch.rand(batch.shape, generator=generator, dtype=torch.float64).to(batch.device)
                batch.copy_((uniform * (batch.max() + 1)).to(batch.dtype))

    def on_train_batch_end(self, *_: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _spread_as(gradient: Tensor, whole: Tensor) -> Tensor:
    """This rank's shard of a tensor that has the shape of the whole gradient."""
    if not isinstance(gradient, DTensor):
        return whole
    # Of a partial sum every term is multiplied.
    placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    return local(distribute_tensor(whole, gradient.device_mesh, placements, src_data_rank=None))
