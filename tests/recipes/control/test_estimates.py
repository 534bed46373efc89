"""The arithmetic of PPO, against sums that are written out."""

import math

import pytest
import torch

from lightning_lowbit.recipes.control.policy import Policy, RunningMoments
from lightning_lowbit.recipes.control.ppo import clipped_objective
from lightning_lowbit.recipes.control.rollout import advantages, discounted, episode_returns
from tests.tables import each

STEPS, COPIES = 7, 3
ENDS = [(2, 0, True), (4, 0, False), (6, 1, False), (3, 2, True)]  # step, environment, whether the task is over


def _rollout():
    generator = torch.Generator().manual_seed(0)
    rewards, values, following = torch.randn(3, STEPS, COPIES, generator=generator, dtype=torch.float64)
    terminated, ended = torch.zeros(2, STEPS, COPIES, dtype=torch.bool)
    for step, copy, is_over in ENDS:
        terminated[step, copy], ended[step, copy] = is_over, True
    return rewards, values, following, terminated, ended


@each("trace", [0.0, 0.9, 1.0])
def test_an_advantage_is_the_sum_of_errors_until_the_episode_ends(trace):
    rewards, values, following, terminated, ended = _rollout()
    found = advantages(rewards, values, following, terminated, ended, 0.8, trace)
    for copy in range(COPIES):
        for start in range(STEPS):
            expected, weight = 0.0, 1.0
            for step in range(start, STEPS):
                ahead = 0.0 if terminated[step, copy] else 0.8 * following[step, copy]
                expected += weight * (rewards[step, copy] + ahead - values[step, copy])
                weight *= 0.8 * trace
                if ended[step, copy]:
                    break
            assert found[start, copy] == pytest.approx(float(expected), abs=1e-12)


def test_sums_of_rewards_begin_with_the_episode_and_go_on_in_the_next_rollout():
    rewards, ended = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([[0, 0], [1, 0], [0, 0]]).bool()
    sums, after = discounted(rewards, ended, 0.5, torch.tensor([8.0, 0]))
    assert sums.tolist() == [[5, 2], [5.5, 5], [5, 8.5]]
    assert after.tolist() == [5, 8.5]
    returns, after = episode_returns(rewards, ended, torch.tensor([8.0, 0]))
    assert returns.tolist() == [12] and after.tolist() == [5, 12]


def test_the_objective_gains_nothing_beyond_the_clip():
    """And loses all that there is to lose: figure 1 of the paper."""
    ratios, advantages = torch.tensor([[1.1, 1.5, 0.5, 0.9, 0.5, 1.5], [2, 2, 2, -2, -2, -2]]).double()
    found = [clipped_objective(*pair, 0.2).item() for pair in zip(ratios, advantages, strict=True)]
    assert found == pytest.approx([2.2, 2.4, 1.0, -1.8, -1.6, -3.0])


def test_the_density_and_the_entropy_are_those_of_a_gaussian():
    policy = Policy(3, 2, [16])
    with torch.no_grad():
        policy.log_deviation.copy_(torch.tensor([0.3, -0.7]))
    actions, means = torch.randn(2, 5, 2)
    gaussian = torch.distributions.Normal(means, policy.log_deviation.exp())
    torch.testing.assert_close(policy.log_probability(actions, means), gaussian.log_prob(actions).sum(-1))
    assert policy.entropy().item() == pytest.approx(gaussian.entropy()[0].sum().item())


def test_running_moments_are_those_of_all_values():
    moments, values = RunningMoments(2), torch.randn(30, 2, dtype=torch.float64) * torch.tensor([3.0, 0.1]) + 5
    assert torch.equal(moments(values), values.clamp(-10, 10).float()), "statistics without a value change nothing"
    for part in values.split([1, 9, 20]):
        moments.update(part)
    torch.testing.assert_close(moments.mean, values.mean(0))
    torch.testing.assert_close(moments.deviation, (values.var(0, correction=0) + 1e-8).sqrt())
    scaled = (values - values.mean(0)) / (values.var(0, correction=0) + 1e-8).sqrt()
    torch.testing.assert_close(moments(values), scaled.float())
    assert moments(torch.full((1, 2), math.inf)).tolist() == [[10, 10]]
