"""SPAM as the algorithm is written: one tensor at a time, float64, a dense mask for what moves."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Reference:
    """One parameter, its hyper-parameters and everything it remembers."""

    parameter: Tensor
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    spike_threshold: float = 5000.0
    reset_interval: int | None = 500
    warmup_steps: int = 150
    maximize: bool = False

    def __post_init__(self):
        self.parameter = self.parameter.detach().double().clone()
        self.t = self.since_reset = self.spikes = 0
        self.m = torch.zeros_like(self.parameter)
        self.v = torch.zeros_like(self.parameter)

    def step(self, gradient, moves=None):
        """One step; ``moves`` is the mask of the elements that have moments, None for all."""
        g = gradient.detach().double().clone()
        self.t += 1
        if self.reset_interval is not None and self.t % self.reset_interval == 0:
            self.m.zero_()
            self.v.zero_()
            self.since_reset = 0

        # SpikeClip; v as it is, not corrected for its bias
        if self.since_reset >= 20:
            is_spike = (self.v > 0) & (g**2 > self.spike_threshold * self.v)
            self.spikes += int(is_spike.sum())
            g[is_spike] = (g.sign() * (self.spike_threshold * self.v).sqrt())[is_spike]

        # The first steps after a reset are short
        rate = self.lr
        if self.reset_interval is not None and self.warmup_steps and self.t >= self.reset_interval:
            progress = min(1.0, self.since_reset / self.warmup_steps)
            rate *= 1 - 0.99 * (1 + math.cos(math.pi * progress)) / 2

        # AdamW; bias correction by the steps since the reset
        self.since_reset += 1
        beta1, beta2 = self.betas
        self.parameter *= 1 - self.lr * self.weight_decay
        self.m = beta1 * self.m + (1 - beta1) * (-g if self.maximize else g)
        self.v = beta2 * self.v + (1 - beta2) * g**2
        m, v = self.m / (1 - beta1**self.since_reset), self.v / (1 - beta2**self.since_reset)
        update = rate * m / (v.sqrt() + self.eps)
        self.parameter -= update if moves is None else update * moves
