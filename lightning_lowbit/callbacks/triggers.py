"""When something is due: a number of optimizer steps, known from the start on or found out on the way.

    at=0.5, step=500    known when training starts, so that a resumed run needs no state
    tokens              known once so many tokens were trained on
    plateau             known once validation has not improved for a while
    below               known once a metric that a callback measures has been small for a while

A trigger answers alike on all ranks, and is asked before the first micro-batch of an optimizer step.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_lowbit.quant.cast import choose, from_fields, is_number


@dataclass(frozen=True)
class Plateau:
    """Several validations in a row in which a metric did not improve; those of sanity checks do not count.

    How many there were is part of a checkpoint. (One from between a step and the validation after it loses this
    validation: Lightning leaves it out in the resumed run.)

    Args:
        monitor: the metric's name in ``trainer.callback_metrics``. Log it with ``sync_dist=True``: of processes with
            different values, one that sees a plateau is enough.
        patience: how many validations, at least 1.
        min_delta: an improvement is larger than this; at least 0.
        mode: ``"min"``: smaller is better; or ``"max"``.

    Raises:
        ValueError: an argument is not one of the above.
    """

    monitor: str = "val_loss"
    patience: int = 5
    min_delta: float = 0.0
    mode: str = "min"

    def __post_init__(self) -> None:
        choose("mode of a plateau", self.mode, ("min", "max"))
        if type(self.patience) is not int or self.patience < 1:
            raise ValueError(f"patience is a number of validations, 1 or more; got {self.patience!r}.")
        if not is_number(self.min_delta) or not 0 <= self.min_delta < math.inf:
            raise ValueError(f"min_delta is what an improvement exceeds, 0 or more; got {self.min_delta!r}.")

    def read(self, trainer: Trainer) -> float:
        """The metric after a validation."""
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise MisconfigurationException(
                f"A switch at a plateau of {self.monitor!r} finds no such metric after a validation, but "
                f"{', '.join(map(repr, metrics)) or 'none at all'}. Log it in validation_step, or name another monitor."
            )
        return float(metrics[self.monitor])

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best before it (None: there is none); one that is not finite never is."""
        if not math.isfinite(value) or best is None:
            return math.isfinite(value)
        return (best - value if self.mode == "min" else value - best) > self.min_delta


@dataclass(frozen=True)
class Below:
    """Several measurements in a row of a metric that are below a threshold; NaN never is.

    By default, how far the gradient stands out from the noise of quantisation: below √3 noise takes over (FP4 All the
    Way, arXiv 2505.19115, section 4).

    Measurements come from a callback of the Trainer, such as ``GradientNoiseMonitor``, by its method
    ``measurements(monitor) -> Sequence[tuple[int, float]]``: optimizer steps and values that the host knows, oldest
    first, the same on all ranks, and a ``KeyError`` for a metric that it does not have. One that is of step i is looked
    at before step i + 2, by when the host knows it, in whatever order callbacks are.

    Args:
        monitor: the metric's name.
        threshold: what the metric is below; finite.
        measurements: how many in a row, at least 1.

    Raises:
        ValueError: an argument is not one of the above.
    """

    monitor: str = "gradient_noise/ratio"
    threshold: float = math.sqrt(3)
    measurements: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str) or not self.monitor:
            raise ValueError(f"monitor is the name of a metric that a callback measures; got {self.monitor!r}.")
        if not is_number(self.threshold) or not math.isfinite(self.threshold):
            raise ValueError(f"threshold is what the metric is below, a finite number; got {self.threshold!r}.")
        if type(self.measurements) is not int or self.measurements < 1:
            raise ValueError(f"measurements is how many in a row, 1 or more; got {self.measurements!r}.")


class Trigger:
    """One way to say when.

    Attributes:
        due: the optimizer steps before it; infinity while that is not known.
        is_known: whether it is known when training starts.
    """

    is_known: ClassVar[bool] = False

    def __init__(self) -> None:
        self.start_afresh()

    def start_afresh(self) -> None:
        """Forgets another run."""
        self.due: float = math.inf

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training starts or goes on; once or several times.

        Raises:
            MisconfigurationException: the run has not what it takes.
        """

    def look(self, trainer: Trainer) -> None:
        """Before the first micro-batch of an optimizer step: looks whether it is due."""

    def see(self, trainer: Trainer, batch: Any) -> None:
        """Before each micro-batch, after :meth:`look`."""

    def after_validation(self, trainer: Trainer) -> None:
        """After a validation within training."""

    def why(self) -> str:
        """What made it due, in words."""
        raise NotImplementedError

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """In primitives, the same on all ranks; called on all of them. Empty where nothing is to be kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with it."""


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


class AtPlateau(Trigger):
    """A plateau of a metric."""

    def __init__(self, plateau: Plateau | Mapping[str, Any]) -> None:
        super().__init__()
        self.plateau = from_fields(Plateau, "a plateau", plateau) if isinstance(plateau, Mapping) else plateau
        if not isinstance(self.plateau, Plateau):
            raise ValueError(f"plateau is a Plateau or a mapping such as {{'monitor': 'val_loss'}}; got {plateau!r}.")

    def start_afresh(self) -> None:
        """Forgets what was seen."""
        super().start_afresh()
        self._best: float | None = None
        self._stalled = 0  # validations without an improvement

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Needs validations."""
        if not trainer.enable_validation:
            raise MisconfigurationException(
                f"{owner}(plateau=...) waits for validations, and this run has none: give the module a "
                "validation_step and its data, or give at or step instead of plateau."
            )

    def after_validation(self, trainer: Trainer) -> None:
        """Looks for a plateau; after one it is due at the next optimizer step that begins."""
        if self.due < math.inf:
            return
        value = self.plateau.read(trainer)
        if self.plateau.improves(value, self._best):
            self._best, self._stalled = value, 0
        else:
            self._stalled += 1
        if trainer.strategy.reduce_boolean_decision(self._stalled >= self.plateau.patience, all=False):
            self.due = trainer.global_step + trainer.fit_loop._should_accumulate()

    def why(self) -> str:
        """What was not improved on."""
        best = "none" if self._best is None else f"{self._best:.6g}"
        return f"plateau of {self.plateau.monitor}, best {best}, {self._stalled} validations without an improvement"

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """What has been seen so far."""
        return {"due": self.due, "best": self._best, "stalled": self._stalled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with it."""
        self.due, self._best, self._stalled = (state[name] for name in ("due", "best", "stalled"))


class AtBelow(Trigger):
    """A metric that is below a threshold."""

    def __init__(self, below: Below | Mapping[str, Any]) -> None:
        super().__init__()
        self.below = from_fields(Below, "below", below) if isinstance(below, Mapping) else below
        if not isinstance(self.below, Below):
            raise ValueError(f"below is a Below or a mapping such as {{'measurements': 3}}; got {below!r}.")

    def start_afresh(self) -> None:
        """Forgets what was seen."""
        super().start_afresh()
        self._in_a_row = 0
        self._value = math.nan  # the last one that was looked at
        self._seen = -1  # the step of it
        self._waiting: list[tuple[int, float]] = []  # measured, by a checkpoint, and not looked at yet
        self._source: Any = None

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the callback that measures."""
        monitor, offered = self.below.monitor, []
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if callable(getattr(callback, "measurements", None)):
                try:
                    callback.measurements(monitor)
                except KeyError as error:
                    offered.append(f"{type(callback).__name__} does not ({error.args[0] if error.args else monitor})")
                    continue
                self._source = callback
                return
        there = "; ".join(offered) or f"no callback of {len(callbacks)} measures anything"
        raise MisconfigurationException(
            f"{owner}(below=...) waits for measurements of {monitor!r}, which no callback of the Trainer offers: "
            f"{there}. Add GradientNoiseMonitor(), which measures 'gradient_noise/ratio', to the callbacks, or name "
            "another monitor."
        )

    def _news(self) -> list[tuple[int, float]]:
        """Measurements that were not looked at, oldest first."""
        found = {step: value for step, value in self._waiting if step > self._seen}
        measured: Sequence[tuple[int, float]] = (
            [] if self._source is None else self._source.measurements(self.below.monitor)
        )
        for step, value in reversed(measured):
            if step <= self._seen:
                break
            found[step] = value
        return sorted(found.items())

    def look(self, trainer: Trainer) -> None:
        """Counts those that are below."""
        if self.due < math.inf:
            return
        for step, value in self._news():
            if step > trainer.global_step - 2:
                break
            self._seen, self._value = step, value
            self._in_a_row = self._in_a_row + 1 if value < self.below.threshold else 0
            if self._in_a_row >= self.below.measurements:
                self.due = trainer.global_step
                break

    def why(self) -> str:
        """The last measurement."""
        below = self.below
        return f"{below.monitor} {self._value:.6g} below {below.threshold:.6g}, {below.measurements} in a row"

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """What has been looked at, and what is still to be: a measuring callback may not keep it."""
        state = {"due": self.due, "in_a_row": self._in_a_row, "value": self._value, "seen": self._seen}
        return {**state, "waiting": self._news() if self.due == math.inf else []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with it."""
        self.due, self._in_a_row, self._value, self._seen = (
            state[name] for name in ("due", "in_a_row", "value", "seen")
        )
        self._waiting = [(step, value) for step, value in state["waiting"]]


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
            f"{owner}({argument}={share}) is a fraction of all optimizer steps, and how many manual optimisation takes "
            f"is not known: set max_steps, or give {instead} instead of {argument}."
        )
    total = trainer.estimated_stepping_batches
    if total == math.inf:
        raise MisconfigurationException(
            f"{owner}({argument}={share}) is a fraction of all steps, and this run has no end: set max_steps or "
            f"max_epochs, or give {instead} instead of {argument}."
        )
    return round(share * total)
