"""What the environments did in an iteration, and how much better than expected each action was.

    δ_t = r_t + γ V(s_t+1) - V(s_t)          without V(s_t+1) where the task was over
    A_t = δ_t + γ λ A_t+1                    without A_t+1 where the episode ended

is generalized advantage estimation (arXiv 1506.02438, equation 16). An episode cut off at its time limit goes on in V.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_lowbit.nn.state.keys import hash_numbers

from .environments import Environments, Numbers


class Rollout(NamedTuple):
    """Steps of several environments; tensors on the host are ``[steps, environments]``, or have sizes after these.

    Attributes:
        observations, next_observations: before and after each step, float32, as the environments gave them.
        means, actions: of the policy, float32.
        rewards: float32.
        terminated, ended: as in :class:`lightning_lowbit.recipes.control.environments.Step`.
    """

    observations: Tensor
    next_observations: Tensor
    means: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    ended: Tensor


def collect(
    environments: Environments, act: Callable[[Numbers], tuple[Tensor, Tensor]], steps: int, seed: int
) -> Rollout:
    """Takes steps in all environments; ``act`` gives means and actions, and ``seed`` decides how episodes begin."""
    rows = []
    for step in range(steps):
        observations = environments.observe(hash_numbers(seed, step))
        means, actions = act(observations)
        after = environments.step(actions.numpy())
        rows.append((observations, after.observations, means, actions, after.rewards, after.terminated, after.ended))
    return Rollout(*(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)))


def discounted(rewards: Tensor, ended: Tensor, discount: float, before: Tensor) -> tuple[Tensor, Tensor]:
    """Discounted sums of the rewards of an episode up to each step, float32 ``[steps, environments]``.

    Args:
        rewards, ended: of a rollout.
        discount: γ.
        before: sums of the episodes that go on, ``[environments]``; 0 where one begins.

    Returns:
        The sums, and what ``before`` is for the next rollout.
    """
    sums = []
    for reward, end in zip(rewards, ended, strict=True):
        before = discount * before + reward
        sums.append(before)
        before = before * ~end
    return torch.stack(sums), before


def advantages(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    ended: Tensor,
    discount: float,
    trace: float,
) -> Tensor:
    """A ``[steps, environments]``, from tensors of this shape.

    Args:
        rewards: r.
        values, next_values: V of the observations before and after each step.
        terminated, ended: bool.
        discount: γ.
        trace: λ; 0 trusts the critic, 1 the rewards.
    """
    errors = rewards + discount * next_values * ~terminated - values
    found, ahead = torch.empty_like(errors), torch.zeros_like(errors[0])
    for step in reversed(range(len(errors))):
        ahead = errors[step] + discount * trace * ahead * ~ended[step]
        found[step] = ahead
    return found


def episode_returns(rewards: Tensor, ended: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``[episodes]`` of the episodes that ended in a rollout, and the sums ``[environments]`` of the others."""
    sums, after = discounted(rewards, ended, 1.0, before)
    return sums[ended], after
