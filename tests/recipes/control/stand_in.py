"""A stand-in for gymnasium, which is no dependency of the fast tests: a point on a line that is to stay at 0."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np


class Box:
    def __init__(self, low, high, shape, dtype=np.float32):
        self.low, self.high, self.shape = np.full(shape, low, dtype), np.full(shape, high, dtype), shape

    def __repr__(self):
        return f"Box{self.shape}"


class Discrete:
    def __repr__(self):
        return "Discrete(2)"


class Line:
    """Observes place and speed ``[2]``, pushes with up to 2 ``[1]``; cut off after ``length`` steps, over beyond 3."""

    def __init__(self, length=4, actions=None, observations=None):
        self.length = length
        self.observation_space = observations or Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = actions or Box(-2, 2, (1,))
        self.spec = SimpleNamespace(max_episode_steps=length)

    def reset(self, *, seed):
        self.state, self.time = np.random.default_rng(seed).uniform(-1, 1, 2), 0
        return self.state.copy(), {}

    def step(self, action):
        assert action.shape == (1,) and abs(action[0]) <= 2
        self.state = self.state * [1, 0.5] + [0.1 * self.state[1], 0.1 * action[0]]
        self.time += 1
        is_over = bool(abs(self.state[0]) > 3)
        cut = self.length is not None and self.time >= self.length
        return self.state.copy(), -float(self.state[0] ** 2), is_over, cut, {}


ERROR = SimpleNamespace(Error=type("Error", (Exception,), {}))
for _name in ("UnregisteredEnv", "DependencyNotInstalled"):
    setattr(ERROR, _name, type(_name, (ERROR.Error,), {}))


def _no_mujoco():
    raise ERROR.DependencyNotInstalled('MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`')


REGISTRY = {
    "Line-v0": Line,
    "Uneven-v0": lambda: Line(3),
    "Endless-v0": lambda: Line(None),
    "Discrete-v0": lambda: Line(actions=Discrete()),
    "Unbounded-v0": lambda: Line(actions=Box(-np.inf, np.inf, (1,))),
    "Words-v0": lambda: Line(observations=Discrete()),
    "HalfCheetah-v5": _no_mujoco,
}


def make(name, disable_env_checker):
    if name not in REGISTRY:
        raise ERROR.UnregisteredEnv(f"Environment `{name}` doesn't exist.")
    return REGISTRY[name]()


def install(monkeypatch):
    """Puts it in gymnasium's place."""
    found = ModuleType("gymnasium")
    found.make, found.registry, found.spaces, found.error = make, REGISTRY, SimpleNamespace(Box=Box), ERROR
    monkeypatch.setitem(sys.modules, "gymnasium", found)
