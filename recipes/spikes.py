"""Gradient spikes on purpose: what an optimizer does about them can be measured only where they are.

    in one step of a hundred, drawn at random, the gradient is a thousand times as large, or a share of its elements

Stable-SPAM's paper finds such spikes in four-bit training (arXiv 2502.17055, section 2) and SPAM's in all training of
language models (arXiv 2501.06842, section 2), where they are rare and models are large.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lightning_lowbit.precision.base import global_seed
from lightning_lowbit.quant.cast import is_number
from lightning_lowbit.quant.rounding import mix_key


class GradientSpikes(Callback):
    """Multiplies some elements of all gradients in some steps, before anything clips them.

    Steps and elements are a function of the seed and the step: the same for every optimizer, and after a resume. Logs
    ``gradient_spike``, 1 in such a step and else 0.

    Args:
        probability: of a step to be one with a spike; the test of this repository: .01.
        factor: what the elements are multiplied with; 1000.
        share: of the elements of each gradient, drawn for each; 1 is the whole gradient.
        seed: of the draws; None takes that of ``seed_everything``, or 0.

    Raises:
        ValueError: a probability or share outside [0, 1], or a factor that is no number.
    """

    def __init__(self, probability: float = 0.01, factor: float = 1000.0, share: float = 1.0, seed: int | None = None) -> None:
        for name, value in (("probability", probability), ("share", share)):
            if not is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"{name} is a number from 0 to 1; got {value!r}.")
        if not is_number(factor):
            raise ValueError(f"factor is a number, such as 1000; got {factor!r}.")
        self.probability, self.factor, self.share, self.seed = probability, factor, share, seed

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Draws whether this is a step with a spike, and which elements."""
        seed = global_seed() if self.seed is None else self.seed
        mixed = int(mix_key(torch.tensor((seed << 32) + trainer.global_step)))
        generator = torch.Generator().manual_seed(mixed % 2**32)  # of more bits it takes no notice
        drawn = torch.rand((), generator=generator).item() < self.probability
        pl_module.log("gradient_spike", float(drawn))
        if drawn:
            gradients: list[Any] = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            for gradient in gradients:
                if gradient is not None:
                    hit = torch.rand(gradient.shape, generator=generator) < self.share
                    gradient.mul_(torch.where(hit, self.factor, 1.0).to(gradient))
