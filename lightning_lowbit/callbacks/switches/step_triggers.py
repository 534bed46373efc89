"""Triggers: the optimizer step at which a switch is due.

    at=0.5, step=500    known when training starts, so a resumed run needs no state
    tokens              known once that many tokens have been trained on
    plateau, below      known once a metric meets a condition, see metric_triggers.py

All ranks get the same answer, before the first micro-batch of an optimizer step.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_lowbit._lightning import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_warn,
    total_steps,
)
from lightning_lowbit.checks import integer, number
from lightning_lowbit.precision.run_settings import data_ranks
from lightning_lowbit.saved_state import NUMBER, count


class Trigger:
    """Base class. ``due`` is a number of optimizer steps or infinity; ``is_known`` if known when training starts.

    ``begin`` checks the run when training starts or resumes, maybe repeatedly; ``look`` decides before the first
    micro-batch of a step; ``see`` gets each micro-batch after that; ``after_validation`` follows validations of a
    training. The attributes that ``saved`` names are the state: primitives, the same on all ranks, which all save it.
    """

    is_known: ClassVar[bool] = False
    saved: ClassVar[dict[Any, Any]] = {}  # kinds by attribute, see `lightning_lowbit.saved_state`

    def __init__(self) -> None:
        self.start_afresh()

    def start_afresh(self) -> None:
        self.due: float = math.inf

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None: ...
    def look(self, trainer: Trainer) -> None: ...
    def see(self, trainer: Trainer, batch: Any) -> None: ...
    def after_validation(self, trainer: Trainer) -> None: ...

    def why(self) -> str:
        """Returns the reason why it became due."""
        raise NotImplementedError

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.saved:
            setattr(self, name, state[name])


class AtStep(Trigger):
    is_known = True

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = integer("step", step, 0, "a number of optimizer steps")

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        self.due = self._step

    def why(self) -> str:
        return f"step={self._step}"


class AtFraction(Trigger):
    is_known = True

    def __init__(self, at: float) -> None:
        super().__init__()
        self._at = number("at", at, "a fraction of all optimizer steps", at_least=0, at_most=1)

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        self.due = steps_of("at", self._at, "step", owner, trainer, pl_module)

    def why(self) -> str:
        return f"at={self._at:g}"


class AtTokens(Trigger):
    """Due after a number of tokens, over all data-parallel ranks.

    Each rank counts its own tokens on the host. At some steps, one collective sums them: if R tokens are missing, at p
    tokens per step so far, the next sum is R / 2p steps later. The number of sums is logarithmic, and the step exact
    unless steps become more than twice as large as their average.
    """

    saved: ClassVar[dict[Any, Any]] = {"due": NUMBER, "began": int | None, "tokens": count, "check": int}

    def __init__(self, tokens: int, count: Callable[[Any], int] | None = None) -> None:
        super().__init__()
        self._limit = integer("tokens", tokens, 0, "how many are trained on first")
        self._count = count_tokens if count is None else count

    def start_afresh(self) -> None:
        super().start_afresh()
        self.began: int | None = None  # the step at which counting began
        self.tokens = 0  # of all ranks, at the last sum
        self.check = 0  # the step at which they are summed next
        self._local = 0  # tokens of this rank since the last sum

    def begin(self, owner: str, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.began is None:
            self.began = self.check = step = trainer.global_step
            if step:
                rank_zero_warn(
                    f"{owner}(tokens={self._limit}) counts tokens from step {step} on: the checkpoint of this run was "
                    "saved without this switch, and does not say how many there were before."
                )

    def look(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if self.due < math.inf or (step < self.check and trainer.world_size > 1):
            return
        self.tokens, self._local = self._total(trainer), 0
        missing = self._limit - self.tokens
        if missing <= 0:
            self.due = step
            return
        steps = step - (self.began or 0)
        self.check = step + max(1, missing * steps // (2 * self.tokens) if self.tokens else 1)

    def see(self, trainer: Trainer, batch: Any) -> None:
        if self.due < math.inf:
            return
        tokens = self._count(batch)
        if isinstance(tokens, Tensor) or not hasattr(tokens, "__index__"):
            rule = "count gives the number of tokens of a batch, an int that needs no device"
            raise MisconfigurationException(f"{rule}; got {tokens!r}. Take it from shapes, such as batch.numel().")
        self._local += operator.index(tokens)

    def _total(self, trainer: Trainer) -> int:
        if trainer.world_size == 1:
            return self.tokens + self._local
        local = torch.tensor(self._local, dtype=torch.int64, device=trainer.strategy.root_device)
        alike = trainer.world_size // data_ranks(trainer)  # model-parallel ranks share a batch
        return self.tokens + int(trainer.strategy.reduce(local, reduce_op="sum")) // alike

    def why(self) -> str:
        return f"tokens={self._limit}, after {self.tokens}"

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        tokens = self.tokens if self.due < math.inf else self._total(trainer)
        return super().state_dict(trainer) | {"tokens": tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._local = 0


def count_tokens(batch: Any) -> int:
    """Returns the number of elements of ``batch["input_ids"]``, or of a batch that is an integer tensor."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = f"{type(batch).__name__} of {batch.dtype}" if isinstance(batch, Tensor) else type(batch).__name__
        rule = "tokens are the elements of batch['input_ids'], or of a batch that is a tensor of integers"
        raise MisconfigurationException(
            f"{rule}; got a {kind}. Give count, a callable that takes a batch and gives the number of its tokens."
        )
    return ids.numel()


def steps_of(
    argument: str, share: float, instead: str, owner: str, trainer: Trainer, pl_module: LightningModule
) -> int:
    """Converts a fraction of all optimizer steps to steps; ``MisconfigurationException`` if their number is unknown."""
    share_of, instead = f"{owner}({argument}={share}) is a fraction of all optimizer steps", f"give {instead} instead"
    if not pl_module.automatic_optimization and trainer.max_steps == -1:
        raise MisconfigurationException(
            f"{share_of}, whose number is not known in manual optimization: set max_steps, or {instead}."
        )
    total = total_steps(trainer)
    if total == math.inf:
        raise MisconfigurationException(
            f"{share_of}, and the end of this run is not known: set max_steps, or max_epochs for data with a length, "
            f"or {instead}."
        )
    return round(share * total)
