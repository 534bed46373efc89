"""When something is due: a number of optimizer steps, known from the start on or found out on the way.

at=0.5, step=500    known when training starts, so that a resumed run needs no state
tokens              known once so many tokens were trained on
plateau, below      known once a metric has done something, see :mod:`.metric_triggers`
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit._lightning import LightningModule, MisconfigurationException, Trainer, rank_zero_warn
from lightning_lowbit.callbacks.switches.metric_triggers import AtBelow, AtPlateau
from lightning_lowbit.callbacks.switches.trigger import Trigger
from lightning_lowbit.checks import is_number


class AtStep(Trigger):
    """A number of optimizer steps."""

    is_known = True

    def __init__(self, step: int) -> None:
        super().__init__()
        if type(step) is not int or step < 0:
            raise ValueError(f"step is a number of optimizer steps, 0 or more; got {step!r}.")
        self._step = step

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """It is due then."""
        self.due = self._step

    def why(self) -> str:
        """The argument."""
        return f"step={self._step}"


class AtFraction(Trigger):
    """A fraction of all optimizer steps."""

    is_known = True

    def __init__(self, at: float) -> None:
        super().__init__()
        if not is_number(at) or not 0 <= at <= 1:
            raise ValueError(f"at is a fraction of all optimizer steps, between 0 and 1; got {at!r}.")
        self._at = at

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resolves it."""
        self.due = steps_of("at", self._at, "step", owner, trainer, pl_module)

    def why(self) -> str:
        """The argument."""
        return f"at={self._at:g}"


class AtTokens(Trigger):
    """A number of tokens, over all data-parallel ranks.

    Each rank counts its own, on the host. At steps that all agree on they add up, by one collective: R tokens before
    the end, where there were p per step so far, the next such step is R / 2p further on. That is some log2 times in a
    run, and exact as long as steps do not get more than twice as large as they were on average.
    """

    def __init__(self, tokens: int, count: Callable[[Any], int] | None = None) -> None:
        super().__init__()
        if type(tokens) is not int or tokens < 0:
            raise ValueError(f"tokens is how many are trained on first, 0 or more; got {tokens!r}.")
        self._tokens, self._count = tokens, count_tokens if count is None else count

    def start_afresh(self) -> None:
        """Forgets how many there were."""
        super().start_afresh()
        self._began: int | None = None  # the step from which on they are counted
        self._agreed = 0  # of all ranks, at the last check
        self._own = 0  # of this rank, since then
        self._check = 0  # the step before which they are added up next

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to count, or goes on."""
        if self._began is None:
            self._began = self._check = step = trainer.global_step
            if step:
                rank_zero_warn(
                    f"{owner}(tokens={self._tokens}) counts tokens from step {step} on: the run was resumed from a "
                    "checkpoint that was saved without this switch, and does not say how many there were before."
                )

    def look(self, trainer: Trainer) -> None:
        """Adds up at some steps."""
        step = trainer.global_step
        if self.due < math.inf or (step < self._check and trainer.world_size > 1):
            return
        self._agreed, self._own = self._total(trainer), 0
        missing = self._tokens - self._agreed
        if missing <= 0:
            self.due = step
            return
        steps = step - (self._began or 0)
        self._check = step + max(1, missing * steps // (2 * self._agreed) if self._agreed else 1)

    def see(self, trainer: Trainer, batch: Any) -> None:
        """Counts those of a micro-batch, which is about to be trained on."""
        if self.due < math.inf:
            return
        number = self._count(batch)
        if isinstance(number, Tensor) or not hasattr(number, "__index__"):
            raise MisconfigurationException(
                f"count gives the number of tokens of a batch, an int, for which nobody waits; got {number!r}. Take it "
                "from shapes, such as batch.numel()."
            )
        self._own += operator.index(number)

    def _total(self, trainer: Trainer) -> int:
        if trainer.world_size == 1:
            return self._agreed + self._own
        own = torch.tensor(self._own, dtype=torch.int64, device=trainer.strategy.root_device)
        sharding = trainer.distributed_sampler_kwargs  # ranks that share a batch count as one
        alike = trainer.world_size // (sharding["num_replicas"] if sharding else 1)
        return self._agreed + int(trainer.strategy.reduce(own, reduce_op="sum")) // alike

    def why(self) -> str:
        """How many there were."""
        return f"tokens={self._tokens}, after {self._agreed}"

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """With the tokens of all ranks: a collective."""
        total = self._agreed if self.due < math.inf else self._total(trainer)
        return {"due": self.due, "began": self._began, "tokens": total, "check": self._check}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with it."""
        self.due, self._began, self._agreed, self._check = (state[n] for n in ("due", "began", "tokens", "check"))
        self._own = 0


#: What each argument says, for messages.
ARGUMENTS = {
    "at": "at (a fraction of all steps)",
    "step": "step (a number)",
    "tokens": "tokens (how many to train on first)",
    "plateau": "plateau (of a validation metric)",
    "below": "below (a threshold of a measured metric)",
}


def trigger_of(count: Callable[[Any], int] | None = None, **arguments: Any) -> Trigger:
    """The trigger that one of some arguments stands for, of which the others are None.

    Raises:
        ValueError: not exactly one is given, or one out of range.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if len(given) != 1:
        *first, last = (ARGUMENTS[name] for name in arguments)
        raise ValueError(
            f"Give either {', '.join(first)} or {last}; got "
            f"{', '.join(f'{name}={value!r}' for name, value in (given or arguments).items())}."
        )
    if count is not None and "tokens" not in given:
        raise ValueError("count counts the tokens of a batch, which nobody asks for: give tokens, or leave out count.")
    if count is not None and not callable(count):
        raise ValueError(f"count takes a batch and gives the number of its tokens; got {count!r}.")
    ((name, value),) = given.items()
    kinds: dict[str, Callable[[Any], Trigger]] = {
        "at": AtFraction,
        "step": AtStep,
        "tokens": lambda tokens: AtTokens(tokens, count),
        "plateau": AtPlateau,
        "below": AtBelow,
    }
    return kinds[name](value)


def count_tokens(batch: Any) -> int:
    """The number of elements of ``batch["input_ids"]``, or of a batch of integers.

    Raises:
        MisconfigurationException: it is neither.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = f"{type(batch).__name__} of {batch.dtype}" if isinstance(batch, Tensor) else type(batch).__name__
        raise MisconfigurationException(
            "tokens are the elements of batch['input_ids'], or of a batch that is a tensor of integers, and the batch "
            f"is a {kind} without them. Give count, a callable that takes a batch and gives the number of its tokens."
        )
    return ids.numel()


def steps_of(
    argument: str, share: float, instead: str, owner: str, trainer: Trainer, pl_module: LightningModule
) -> int:
    """A fraction of all optimizer steps as a number of them.

    Raises:
        MisconfigurationException: how many the run has is not known.
    """
    if not pl_module.automatic_optimization and trainer.max_steps == -1:
        raise MisconfigurationException(
            f"{owner}({argument}={share}) is a fraction of all optimizer steps, and how many manual optimization takes "
            f"is not known: set max_steps, or give {instead} instead of {argument}."
        )
    total = trainer.estimated_stepping_batches
    if total == math.inf:
        raise MisconfigurationException(
            f"{owner}({argument}={share}) is a fraction of all steps, and this run has no end: set max_steps or "
            f"max_epochs, or give {instead} instead of {argument}."
        )
    return round(share * total)
