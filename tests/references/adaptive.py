"""The guards as their algorithms are written: one tensor at a time, float64, averages divided by 1 − γᵗ."""

import math
from dataclasses import dataclass

import torch


@dataclass
class Guard:
    """One gradient's guards, their hyper-parameters and everything they remember."""

    element_clip: str | None = "ada_clip"
    norm_clip: str | None = "ada_gn"
    gamma1: float = 0.7
    gamma2: float = 0.9
    gamma3: float = 0.999
    norm_eps: float = 1e-8
    spike_threshold: float = 5000.0
    max_norm: float = 1.0
    total_steps: int | None = None

    def __post_init__(self):
        self.t = 0
        self.threshold_average = self.norm_average = self.norm_square_average = 0.0
        self.gamma1_product = 1.0
        self.maximum = self.threshold = self.multiplier = self.norm = self.norm_after = 0.0
        self.clipped = 0

    def clip(self, gradient, v=None, gradients_in_v=0):
        """AdaClip or SpikeClip; ``v`` is the second moment without its bias correction."""
        g = gradient.detach().double().clone()
        self.t += 1
        self.maximum = max((abs(x) for x in g.flatten().tolist()), default=0.0)
        before = g
        if self.element_clip == "ada_clip":
            self.threshold_average = self.gamma3 * self.threshold_average + (1 - self.gamma3) * self.maximum
            self.threshold = self.threshold_average / (1 - self.gamma3**self.t)
            if self.maximum > self.threshold:
                g = torch.where(g.abs() > self.threshold, g * (self.threshold / self.maximum), g)
        if self.element_clip == "spike_clip" and v is not None and gradients_in_v >= 20:
            is_spike = (v > 0) & (g * g > self.spike_threshold * v)
            g = torch.where(is_spike, g.sign() * (self.spike_threshold * v).sqrt(), g)
        # The first maximum and its threshold differ by a rounding.
        self.clipped = int(((g - before).abs() > 1e-12 * before.abs()).sum())
        self.norm = norm_of(g)
        return g

    def rescale(self, g, total_norm):
        """AdaGN or GradClip of what `clip` gave; ``total_norm`` is that of all gradients under GradClip."""
        if self.norm_clip == "ada_gn":
            gamma1 = self.gamma1 * cosine_to_half(self.t, self.total_steps)
            self.gamma1_product *= gamma1
            self.norm_average = gamma1 * self.norm_average + (1 - gamma1) * self.norm
            self.norm_square_average = self.gamma2 * self.norm_square_average + (1 - self.gamma2) * self.norm**2
            mean = self.norm_average / (1 - self.gamma1_product)
            mean_square = self.norm_square_average / (1 - self.gamma2**self.t)
            self.multiplier = mean / (math.sqrt(mean_square) + self.norm_eps)
            if self.norm > 0:
                g = g / self.norm * self.multiplier
        if self.norm_clip == "grad_clip":
            g = g * min(1.0, self.max_norm / (total_norm + 1e-6))  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        self.norm_after = norm_of(g)
        return g


def norm_of(*tensors):
    """‖·‖₂ over all elements of all tensors."""
    return math.sqrt(sum(x * x for tensor in tensors for x in tensor.double().flatten().tolist()))


def norm_under_grad_clip(guards):
    """‖·‖₂ over all gradients that GradClip bounds together, after the clip of their elements."""
    return math.sqrt(sum(guard.norm**2 for guard in guards if guard.norm_clip == "grad_clip"))


def cosine_to_half(t, total_steps):
    """1 at the start, a half from step ``total_steps`` on."""
    if total_steps is None:
        return 1.0
    return 0.5 + 0.5 * (1 + math.cos(math.pi * min(t, total_steps) / total_steps)) / 2


def guard_all(guards, gradients, second_moments):
    """Gradients of one step as the wrapped optimizer sees them; None if any of them holds a NaN or Inf."""
    if not all(math.isfinite(x) for g in gradients for x in g.flatten().tolist()):
        return None
    clipped = [guard.clip(g, v, guard.t) for guard, g, v in zip(guards, gradients, second_moments, strict=True)]
    total_norm = norm_under_grad_clip(guards)
    return [guard.rescale(g, total_norm) for guard, g in zip(guards, clipped, strict=True)]
