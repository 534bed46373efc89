"""Actor, critic and running statistics.

    actor     observation -> mean of a Gaussian over actions       its standard deviation is a parameter of each action
    critic    observation -> value: expected discounted reward

Both are tanh networks of their own, as in PPO's paper (arXiv 1707.06347, section 6.1). Initial weights are orthogonal,
and those of the actor's last layer small, which matters more than most else (arXiv 2006.05990, section 3.2).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_LIMIT = 10.0  # of normalized numbers, in standard deviations


class Network(nn.Module):
    """A tanh network: ``first`` reads observations, layers of ``hidden`` follow, ``last`` gives the outputs, float32.

    Args:
        inputs, outputs: sizes of an observation and of an output.
        hidden_sizes: of the layers between; multiples of 16 fill the blocks of NVFP4, and of 128 those of all casts.
        gain: of the last layer's initial weights.
    """

    def __init__(self, inputs: int, outputs: int, hidden_sizes: Sequence[int], gain: float) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden_sizes[0])
        self.hidden = nn.ModuleList(map(nn.Linear, hidden_sizes[:-1], hidden_sizes[1:]))
        self.last = nn.Linear(hidden_sizes[-1], outputs)
        for layer in (self.first, *self.hidden, self.last):
            nn.init.orthogonal_(layer.weight, gain if layer is self.last else math.sqrt(2))
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        outputs: Tensor = self.last(x)
        return outputs.float()


class Policy(nn.Module):
    """Actor and critic; actions are Gaussian with the actor's mean.

    Attributes:
        log_deviation: ln of the standard deviations ``[actions]``, the same in all states.
    """

    def __init__(self, observations: int, actions: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.actor = Network(observations, actions, hidden_sizes, gain=0.01)
        self.critic = Network(observations, 1, hidden_sizes, gain=1.0)
        self.log_deviation = nn.Parameter(torch.zeros(actions))

    def value(self, observations: Tensor) -> Tensor:
        """Values ``[...]`` of normalized observations ``[..., size]``."""
        return self.critic(observations).squeeze(-1)

    def log_probability(self, actions: Tensor, means: Tensor) -> Tensor:
        """ln of the density ``[...]`` of actions ``[..., actions]`` about means."""
        scaled = (actions - means) * torch.exp(-self.log_deviation)
        return (-0.5 * scaled.square() - self.log_deviation - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self) -> Tensor:
        """Returns the entropy of the policy in any state, 0-d, in nats."""
        return (self.log_deviation + 0.5 * math.log(2 * math.pi * math.e)).sum()


class RunningMoments(nn.Module):
    """Mean and variance of all numbers so far, in float64; a checkpoint has them.

    Sums are combined as in Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983).
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))  # sum of squared deviations

    def update(self, values: Tensor) -> None:
        """Adds values ``[number, size]``."""
        values = values.double()
        added, mean = len(values), values.mean(0)
        shift, total = mean - self.mean, self.count + added
        self.squares += (values - mean).square().sum(0) + shift.square() * self.count * added / total
        self.mean += shift * added / total
        self.count.copy_(total)

    @property
    def deviation(self) -> Tensor:
        """The standard deviations ``[size]``; 1 before the first update."""
        return torch.where(self.count > 0, (self.squares / self.count.clamp(min=1) + 1e-8).sqrt(), 1.0)

    def forward(self, values: Tensor) -> Tensor:
        """Values ``[..., size]`` with mean 0 and variance 1, float32, cut off at 10 standard deviations."""
        return self.scaled(values - self.mean)

    def scaled(self, values: Tensor) -> Tensor:
        """Values over their standard deviations alone, without subtracting means."""
        return (values / self.deviation).clamp(-_LIMIT, _LIMIT).float()
