"""Proximal policy optimization (PPO), in manual optimization: each training batch has many optimizer steps.

An iteration takes ``steps`` steps in ``copies`` environments, and then some epochs over them in minibatches of

    L = -mean(min(ρ A, clip(ρ, 1 - ε, 1 + ε) A)) + c_v mean((V - R)²) - c_h H        ρ = π(a|s) / π_rollout(a|s)

(arXiv 1707.06347, equations 7 and 9), with advantages A of mean 0 and variance 1 in each minibatch, R = A + V before
that, and H the entropy. Observations have mean 0 and variance 1, and rewards are over the standard deviation of the
discounted return, both of all iterations before (arXiv 2006.05990, section 3.3; arXiv 2005.12729).
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowbit._lightning import LRSchedulerCallable, OptimizerCallable
from lightning_lowbit.checks import fraction, integer, number, positive
from lightning_lowbit.distributed import gradient_norm
from lightning_lowbit.nn.state.keys import hash_numbers
from lightning_lowbit.precision.run_settings import seed_or_global

from ..models import RecipeModule
from .environments import Environments, Numbers
from .policy import Policy, RunningMoments
from .rollout import advantages, collect, discounted, episode_returns


class Samples(NamedTuple):
    """Steps of an iteration, in any order; tensors ``[samples, ...]`` on the device, float32.

    ``log_probabilities`` are those of the rollout, and ``targets`` what the critic learns.
    """

    observations: Tensor
    actions: Tensor
    log_probabilities: Tensor
    advantages: Tensor
    targets: Tensor


def clipped_objective(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """PPO's objective of each sample, to be maximized: min(ρ A, clip(ρ, 1 - ε, 1 + ε) A)."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def count_steps(batch: int) -> int:
    """Steps of all environments in an iteration, for :class:`lightning_lowbit.Throughput`."""
    return batch


class Iterations:
    """The batches of a run: for each iteration the number of its steps. A resumed run has no place in it to find."""

    def __init__(self, number: int, steps: int) -> None:
        self.number, self.steps = number, steps

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[int]:
        return repeat(self.steps, self.number)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: all batches are alike, and ``max_steps`` ends the run."""


class PPO(RecipeModule):
    """Learns continuous control in an environment of gymnasium, in one process.

    A training batch is an iteration; ``max_steps``, phases and checkpoints count optimizer steps, and the run stops at
    exactly ``max_steps``. Rollouts, training and evaluation compute with the same casts.

    Logs for each iteration the means over its optimizer steps of ``loss``, ``grad_norm`` (before clipping) and ``kl``
    (from the rollout's policy), ``episode_return`` of the episodes that ended in it, and ``mismatch``: mean |ln ρ|
    before its first optimizer step, 0 where training computes what the rollout did. Validation logs ``val_return``, the
    mean return of episodes without exploration that begin alike in all runs, and ``val_loss``, which is minus that:
    lower is better, as ``lowbit compare`` reads it.

    A resumed run repeats the uninterrupted one if all episodes end with an iteration, as those of Pendulum-v1 do after
    200 steps. Elsewhere episodes begin anew: states of environments cannot be saved.

    Args:
        environment: a name that gymnasium knows, with continuous observations and actions, and a time limit.
        copies: environments that take steps together.
        steps: of each of them in an iteration.
        epochs: how often an iteration's steps are learned from.
        batch_size: samples of an optimizer step; divides ``copies * steps``.
        discount: γ.
        trace: λ of the advantages.
        clip: ε.
        value_weight, entropy_weight: c_v and c_h.
        max_gradient_norm: clips gradients before the optimizer sees them; None does not.
        hidden_sizes: of actor and critic, see :class:`lightning_lowbit.recipes.control.policy.Network`.
        evaluation_episodes: of a validation.
        seed: of weights, exploration and episodes; None takes that of ``seed_everything``, or 0.
        optimizer: creates the optimizer from the parameters.
        scheduler: creates the learning-rate schedule, stepped once per optimizer step; None for a constant rate.

    Raises:
        ValueError: the environment cannot be used, a number is out of range, or ``batch_size`` does not divide. Before
            training: there are several processes, or ``max_steps`` is not given.
    """

    makes_layers_at_once = True

    def __init__(
        self,
        environment: str = "Pendulum-v1",
        copies: int = 16,
        steps: int = 200,
        epochs: int = 10,
        batch_size: int = 640,
        discount: float = 0.9,
        trace: float = 0.95,
        clip: float = 0.2,
        value_weight: float = 0.5,
        entropy_weight: float = 0.0,
        max_gradient_norm: float | None = 0.5,
        hidden_sizes: Sequence[int] = (128, 128),
        evaluation_episodes: int = 20,
        seed: int | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.automatic_optimization = False
        self.copies, self.steps = integer("copies", copies, 1), integer("steps", steps, 1)
        self.epochs, self.batch_size = integer("epochs", epochs, 1), integer("batch_size", batch_size, 2)
        if self.samples % batch_size:
            raise ValueError(
                f"batch_size divides the {copies} x {steps} = {self.samples} steps of an iteration (copies x steps); "
                f"got {batch_size}."
            )
        self.discount, self.trace = fraction("discount", discount), number("trace", trace, at_least=0, at_most=1)
        self.clip = positive("clip", clip)
        self.value_weight = number("value_weight", value_weight, at_least=0)
        self.entropy_weight = number("entropy_weight", entropy_weight, at_least=0)
        self.max_gradient_norm = positive("max_gradient_norm", max_gradient_norm, or_none=True)
        self.evaluation_episodes = integer("evaluation_episodes", evaluation_episodes, 1)
        self.seed = seed_or_global(seed)
        if not hidden_sizes:
            raise ValueError("hidden_sizes has the size of at least one layer; got none.")
        sizes = [integer("hidden_sizes", size, 1, "sizes of layers") for size in hidden_sizes]
        self.environment, self._environments = environment, Environments(environment, copies)
        observations, actions = self._environments.observation_size, self._environments.action_size
        with self.initialized(self.seed):
            self.policy = Policy(observations, actions, sizes)
        self.example_input_array = torch.zeros(2, observations)
        self.observed, self.returns = RunningMoments(observations), RunningMoments(1)
        self._discounted, self._undiscounted = torch.zeros(copies), torch.zeros(copies)  # of episodes that go on
        self._norms: list[Tensor] = []

    @property
    def samples(self) -> int:
        """Steps of all environments in an iteration."""
        return self.copies * self.steps

    def prepare_data(self) -> None:
        """Checks the Trainer, before any logger writes a file."""
        if self.trainer.world_size > 1:
            raise ValueError(f"PPO trains in one process, and here are {self.trainer.world_size}: give devices=1.")
        if self.trainer.max_steps == -1 and self.trainer.state.fn == "fit":
            raise ValueError("PPO counts optimizer steps: give trainer.max_steps, not epochs or time.")

    def train_dataloader(self) -> Iterations:
        batches = self.epochs * self.samples // self.batch_size
        return Iterations(math.ceil(self.trainer.max_steps / batches), self.samples)

    def val_dataloader(self) -> list[int]:
        return [self.evaluation_episodes]

    def forward(self, observations: Tensor) -> Tensor:
        """Actions ``[..., actions]`` without exploration, where -1 and 1 are the environment's bounds."""
        return self.policy.actor(self.observed(observations))

    # --- training -----------------------------------------------------------------------------------------------------

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(hash_numbers(self.seed, self.trainer.global_step))
        samples = self._experience(generator)
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        losses, changes = [], []
        self._norms = []
        for minibatch in self._minibatches(samples, generator):
            loss, change = self._loss(minibatch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            losses.append(loss.detach())
            changes.append(change)
            if self.trainer.global_step >= self.trainer.max_steps:
                break
        ratios = torch.stack(changes).exp()
        loss = torch.stack(losses).mean()
        metrics = {"loss": loss, "grad_norm": torch.stack(self._norms).mean()}
        self.log_dict(metrics, prog_bar=True, batch_size=1)
        # ρ - 1 - ln ρ is never negative, and its mean has no bias (J. Schulman, "Approximating KL Divergence").
        kl = (ratios - 1 - torch.stack(changes)).mean()
        self.log_dict({"kl": kl, "mismatch": changes[0].abs().mean()}, batch_size=1)
        return loss

    @torch.no_grad()
    def _experience(self, generator: torch.Generator) -> Samples:
        def act(observations: Numbers) -> tuple[Tensor, Tensor]:
            means = self(torch.from_numpy(observations).to(self.device)).cpu()
            return means, means + deviation * torch.randn(means.shape, generator=generator)

        deviation = self.policy.log_deviation.exp().cpu()
        seed = hash_numbers(self.seed, self.trainer.global_step)
        rollout = collect(self._environments, act, self.steps, seed)
        finished, self._undiscounted = episode_returns(rollout.rewards, rollout.ended, self._undiscounted)
        if len(finished):
            self.log("episode_return", finished.mean(), prog_bar=True, batch_size=1)
        sums, self._discounted = discounted(rollout.rewards, rollout.ended, self.discount, self._discounted)
        raw = rollout.observations.to(self.device)
        observations, following = self.observed(raw), self.observed(rollout.next_observations.to(self.device))
        self.observed.update(raw.flatten(0, 1))
        self.returns.update(sums.reshape(-1, 1).to(self.device))
        rewards = self.returns.scaled(rollout.rewards.to(self.device))
        values, next_values = self.policy.value(torch.stack([observations, following]))
        actions, means = rollout.actions.to(self.device), rollout.means.to(self.device)
        ends = rollout.terminated.to(self.device), rollout.ended.to(self.device)
        gains = advantages(rewards, values, next_values, *ends, self.discount, self.trace)
        log_probabilities = self.policy.log_probability(actions, means)
        columns = observations, actions, log_probabilities, gains, gains + values
        return Samples(*(column.flatten(0, 1) for column in columns))

    def _minibatches(self, samples: Samples, generator: torch.Generator) -> Iterator[Samples]:
        for _ in range(self.epochs):
            for chosen in torch.randperm(self.samples, generator=generator).reshape(-1, self.batch_size):
                yield Samples(*(column[chosen.to(column.device)] for column in samples))

    def _loss(self, batch: Samples) -> tuple[Tensor, Tensor]:
        """Returns the loss, and ln ρ of each sample."""
        change = self.policy.log_probability(batch.actions, self.policy.actor(batch.observations))
        change = change - batch.log_probabilities
        advantage = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
        objective = clipped_objective(change.exp(), advantage, self.clip).mean()
        error = (self.policy.value(batch.observations) - batch.targets).square().mean()
        loss = self.value_weight * error - objective - self.entropy_weight * self.policy.entropy()
        return loss, change.detach()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Notes the gradient norm, then clips: callbacks, and optimizers in fp16, have unscaled the gradients."""
        self._norms.append(gradient_norm([*self.parameters()]))
        if self.max_gradient_norm is not None:
            self.clip_gradients(optimizer, self.max_gradient_norm, "norm")

    # --- evaluation ---------------------------------------------------------------------------------------------------

    @cached_property
    def _evaluation(self) -> Environments:
        return Environments(self.environment, self.evaluation_episodes)

    def validation_step(self, batch: int, batch_idx: int) -> None:
        result = self.evaluate().mean()
        self.log("val_return", result, prog_bar=True, batch_size=1)
        self.log("val_loss", -result, batch_size=1)

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """Returns of ``evaluation_episodes`` episodes without exploration, float32 ``[episodes]``."""
        environments = self._evaluation
        environments.restart()
        returns, running = torch.zeros(self.evaluation_episodes), torch.ones(self.evaluation_episodes, dtype=torch.bool)
        while running.any():
            actions = self(torch.from_numpy(environments.observe(seed=0)).to(self.device))
            after = environments.step(actions.cpu().numpy())
            returns += torch.from_numpy(after.rewards) * running
            running &= ~torch.from_numpy(after.ended)
        return returns
