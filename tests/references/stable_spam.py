"""Stable-SPAM as the algorithm is written: one tensor at a time, float64, moving averages divided by 1 − γᵗ."""

import math

import torch

from tests.references.adaptive import Guard, cosine_to_half, norm_under_grad_clip


class Reference:
    """One parameter, its hyper-parameters and everything it remembers; ``rules`` are fields of its `Guard`."""

    def __init__(
        self,
        parameter,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        reset_interval=1000,
        warmup_steps=0,
        matrices_only=False,
        maximize=False,
        **rules,
    ):
        self.parameter = parameter.detach().double().clone()
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.reset_interval, self.warmup_steps, self.maximize = reset_interval, warmup_steps, maximize
        self.guard = Guard(norm_eps=eps, **rules)
        if matrices_only and self.parameter.dim() < 2:
            self.guard, self.reset_interval = Guard(element_clip=None, norm_clip=None), None
        self.t = self.k = 0
        self.beta1_product = 1.0
        self.exp_avg = torch.zeros_like(self.parameter)
        self.exp_avg_sq = torch.zeros_like(self.parameter)

    def step(self, gradient):
        """A step of this parameter alone."""
        step_all([self], [gradient])

    def clip(self, gradient):
        """MoRet, and the clip of the elements."""
        self.t += 1
        if self.reset_interval is not None and self.t % self.reset_interval == 0:
            self.exp_avg.zero_()
            self.exp_avg_sq.zero_()
            self.beta1_product = 1.0
            self.k = 0
        return self.guard.clip(gradient, self.exp_avg_sq, self.k)

    def update(self, clipped, total_norm):
        """Weight decay, the rule for the norm, and Adam."""
        self.parameter = self.parameter * (1 - self.lr * self.weight_decay)
        g = self.guard.rescale(clipped, total_norm)
        if self.maximize:
            g = -g
        rate = self.lr * self.warmth()
        self.k += 1
        beta1, beta2 = self.betas[0] * cosine_to_half(self.t, self.guard.total_steps), self.betas[1]
        self.beta1_product *= beta1
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * g
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * g * g
        m = self.exp_avg / (1 - self.beta1_product)
        v = self.exp_avg_sq / (1 - beta2**self.k)
        self.parameter = self.parameter - rate * m / (v.sqrt() + self.eps)

    def warmth(self):
        """Share of the learning rate: from a hundredth in the step of a reset to all of it, along a cosine."""
        if self.warmup_steps == 0 or self.reset_interval is None or self.t < self.reset_interval:
            return 1.0
        return 1 - 0.99 * (1 + math.cos(math.pi * min(self.k, self.warmup_steps) / self.warmup_steps)) / 2


def step_all(references, gradients):
    """One step of all parameters, or none if any element of any gradient is not finite."""
    given = [(r, g) for r, g in zip(references, gradients, strict=True) if g is not None]
    if all(math.isfinite(x) for _, g in given for x in g.flatten().tolist()):
        clipped = [reference.clip(gradient) for reference, gradient in given]
        total_norm = norm_under_grad_clip([reference.guard for reference, _ in given])
        for (reference, _), g in zip(given, clipped, strict=True):
            reference.update(g, total_norm)
