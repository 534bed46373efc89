"""Stable-SPAM as the algorithm is written: one tensor at a time, float64, moving averages divided by 1 − γᵗ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Reference:
    """One parameter, its hyper-parameters and everything it remembers."""

    parameter: Tensor
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    gamma1: float = 0.7
    gamma2: float = 0.9
    gamma3: float = 0.999
    reset_interval: int = 1000

    def __post_init__(self) -> None:
        self.parameter = self.parameter.detach().double().clone()
        self.t = self.k = 0
        self.threshold_average = self.norm_average = self.norm_square_average = 0.0
        self.threshold = self.multiplier = 0.0
        self.exp_avg = torch.zeros_like(self.parameter)
        self.exp_avg_sq = torch.zeros_like(self.parameter)

    def step(self, gradient: Tensor) -> None:
        g = gradient.detach().double().clone()
        self.t += 1
        self.parameter = self.parameter * (1 - self.lr * self.weight_decay)

        # AdaClip
        largest = max((abs(x) for x in g.flatten().tolist()), default=0.0)
        self.threshold_average = self.gamma3 * self.threshold_average + (1 - self.gamma3) * largest
        self.threshold = self.threshold_average / (1 - self.gamma3**self.t)
        if largest > self.threshold:
            g = torch.where(g.abs() > self.threshold, g * (self.threshold / largest), g)

        # AdaGN
        norm = math.sqrt(sum(x * x for x in g.flatten().tolist()))
        self.norm_average = self.gamma1 * self.norm_average + (1 - self.gamma1) * norm
        self.norm_square_average = self.gamma2 * self.norm_square_average + (1 - self.gamma2) * norm**2
        mean = self.norm_average / (1 - self.gamma1**self.t)
        mean_square = self.norm_square_average / (1 - self.gamma2**self.t)
        self.multiplier = mean / (math.sqrt(mean_square) + self.eps)
        if norm > 0:
            g = g / norm * self.multiplier

        # MoRet
        if self.t % self.reset_interval == 0:
            self.exp_avg.zero_()
            self.exp_avg_sq.zero_()
            self.k = 0

        # Adam
        self.k += 1
        beta1, beta2 = self.betas
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * g
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * g * g
        m = self.exp_avg / (1 - beta1**self.k)
        v = self.exp_avg_sq / (1 - beta2**self.k)
        self.parameter = self.parameter - self.lr * m / (v.sqrt() + self.eps)


def step_all(references: Sequence[Reference], gradients: Sequence[Tensor | None]) -> None:
    """One step of all parameters, or none if any element of any gradient is not finite."""
    given = [(r, g) for r, g in zip(references, gradients, strict=True) if g is not None]
    if all(math.isfinite(x) for _, g in given for x in g.flatten().tolist()):
        for reference, gradient in given:
            reference.step(gradient)
