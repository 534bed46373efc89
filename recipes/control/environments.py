"""Copies of an environment of gymnasium that take steps together, in NumPy."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lowbit.checks import integer, nearest
from lightning_lowbit.nn.state.keys import hash_numbers
from lightning_lowbit.packages import install

Numbers = NDArray[np.float32]
Flags = NDArray[np.bool_]


class Step(NamedTuple):
    """What follows the actions of ``count`` environments.

    Attributes:
        observations: float32 ``[count, observation_size]``, also the last ones of episodes that ended.
        rewards: float32 ``[count]``.
        terminated: whether the task is over: what follows is worth nothing. False at a time limit.
        ended: whether the episode is over, for either reason.
    """

    observations: Numbers
    rewards: Numbers
    terminated: Flags
    ended: Flags


class Environments:
    """Copies of one environment, with flat observations, and actions from -1 to 1.

    Args:
        environment: a name that gymnasium knows, such as ``"Pendulum-v1"`` or ``"HalfCheetah-v5"``.
        count: number of copies.

    Attributes:
        observation_size, action_size: numbers of an observation and of an action.

    Raises:
        ValueError: gymnasium or what the environment needs is not installed, there is no such environment, its
            observations or actions are not continuous, or its episodes have no time limit.
    """

    def __init__(self, environment: str, count: int) -> None:
        self._made = [_make(environment) for _ in range(integer("count", count, 1))]
        observations, actions = self._made[0].observation_space, self._made[0].action_space
        _check(environment, self._made[0])
        self.observation_size, self.action_size = math.prod(observations.shape), math.prod(actions.shape)
        self._low, self._high = actions.low, actions.high
        self._observations = np.zeros((count, self.observation_size), np.float32)
        self._ended = np.ones(count, np.bool_)

    def restart(self) -> None:
        """Ends all episodes: :meth:`observe` begins new ones."""
        self._ended[:] = True

    def observe(self, seed: int) -> Numbers:
        """The observations of all, float32 ``[count, observation_size]``.

        Episodes that have ended begin anew: ``seed`` and the number of the copy decide how.
        """
        for index in np.flatnonzero(self._ended):
            observation, _ = self._made[index].reset(seed=hash_numbers(seed, int(index)) % 2**31)
            self._observations[index] = np.ravel(observation)
        self._ended[:] = False
        return self._observations.copy()

    def step(self, actions: Numbers) -> Step:
        """Takes the actions ``[count, action_size]``, of which what exceeds -1 to 1 is cut off."""
        shares = (np.clip(actions, -1, 1).reshape(-1, *self._low.shape) + 1) / 2
        rewards, terminated = np.zeros(len(self._made), np.float32), np.zeros(len(self._made), np.bool_)
        for index, (environment, share) in enumerate(zip(self._made, shares, strict=True)):
            action = (self._low + share * (self._high - self._low)).astype(self._low.dtype)
            observation, reward, is_over, is_cut, _ = environment.step(action)
            self._observations[index], rewards[index] = np.ravel(observation), reward
            terminated[index], self._ended[index] = is_over, is_over or is_cut
        return Step(self._observations.copy(), rewards, terminated, self._ended.copy())


def _make(environment: str) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ValueError(f"Environments come with gymnasium: {install('gymnasium')}.") from error
    try:
        return gymnasium.make(environment, disable_env_checker=True)
    except gymnasium.error.DependencyNotInstalled as error:
        told = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"environment {environment!r} needs another package: {told}.") from error
    except gymnasium.error.UnregisteredEnv as error:
        newest_first = [*reversed(gymnasium.registry)]
        hint = nearest(environment, newest_first, most=2) or " gymnasium.registry lists all."
        raise ValueError(f"environment is a name that gymnasium knows; got {environment!r}.{hint}") from error
    except (gymnasium.error.Error, ImportError) as error:
        told = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"environment {environment!r} cannot be made: {told}.") from error


def _check(environment: str, made: Any) -> None:
    from gymnasium import spaces

    observations, actions = made.observation_space, made.action_space
    if made.spec.max_episode_steps is None:
        raise ValueError(
            f"environment {environment!r} has no time limit, without which an evaluation may not end: register it with "
            "max_episode_steps."
        )
    if not isinstance(observations, spaces.Box):
        raise ValueError(
            f"environment {environment!r} has observations {observations}, and the networks take a vector of numbers "
            "(Box): choose another, such as 'Pendulum-v1' or 'HalfCheetah-v5'."
        )
    if not isinstance(actions, spaces.Box) or not np.isfinite([actions.low, actions.high]).all():
        raise ValueError(
            f"environment {environment!r} has actions {actions}, and the policy draws continuous ones between bounds "
            "(Box): choose another, such as 'Pendulum-v1' or 'HalfCheetah-v5'."
        )
