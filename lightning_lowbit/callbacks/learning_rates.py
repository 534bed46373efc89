"""Learning rates that are smaller for a while, of which no schedule knows.

Within the step of an optimizer, and nowhere else, the learning rates of its groups are multiplied with a factor. Some
schedules compute a learning rate from the last one, and would go on from a smaller one; and what a checkpoint holds,
and a ``LearningRateMonitor`` logs, is what the schedule says.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch.optim import Optimizer


class LowerRates:
    """Multiplies the learning rates of an optimizer within its steps. Several of one optimizer multiply.

    Args:
        optimizer: any; its learning rates are numbers or tensors, which are replaced for the step and put back.
        factor: what they are multiplied with.

    Attributes:
        factor: may be set between steps; with 1 they are left alone.

    Example:
        >>> lower = LowerRates(optimizer, 0.5)
        >>> optimizer.step()
        >>> lower.release()
    """

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self.factor = factor
        self._hooks = _HOOKS.get(optimizer) or _Hooks(optimizer)
        self._hooks.add(self)

    def release(self) -> None:
        """Ends it, also amid a step that broke off."""
        self._hooks.remove(self)


class Rewarm:
    """Lets the learning rate rise linearly to what the schedule says: the i-th step has i / ``steps`` of it.

    Args:
        steps: how many it takes, at least 1.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._lowered: list[LowerRates] = []

    def follow(self, optimizers: Sequence[Optimizer], taken: int) -> None:
        """Sets the learning rate of the next step, ``taken`` steps after the first; before, it is the schedule's."""
        factor = 1.0 if taken < 0 else min(1.0, (taken + 1) / self._steps)
        if factor == 1:
            self.release()
        elif not self._lowered:
            self._lowered = [LowerRates(optimizer, factor) for optimizer in optimizers]
        for lowered in self._lowered:
            lowered.factor = factor

    def release(self) -> None:
        """Ends it, or interrupts it; it may be followed again."""
        for lowered in self._lowered:
            lowered.release()
        self._lowered = []


class _Hooks:
    """Those of one optimizer: hooks after a step run in the order of those before it, so two would not be nested."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._lower_rates: list[LowerRates] = []
        self._handles: list[Any] = []
        self._rates: list[Any] = []
        self._depth = 0  # torch calls hooks once more where the step of a class calls that of its base

    def add(self, one: LowerRates) -> None:
        if not self._handles:
            register = (self._optimizer.register_step_pre_hook, self._optimizer.register_step_post_hook)
            self._handles = [register[0](self._lower), register[1](self._restore)]
            _HOOKS[self._optimizer] = self
        self._lower_rates.append(one)

    def remove(self, one: LowerRates) -> None:
        if one not in self._lower_rates:
            return
        self._lower_rates.remove(one)
        if self._depth:
            self._depth = 1
            self._restore()
        if not self._lower_rates:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            del _HOOKS[self._optimizer]

    def _lower(self, *_: Any) -> None:
        self._depth += 1
        factor = prod(one.factor for one in self._lower_rates)
        if self._depth == 1:
            self._rates = [group["lr"] for group in self._optimizer.param_groups]
            for group in self._optimizer.param_groups if factor != 1 else ():
                group["lr"] = group["lr"] * factor

    def _restore(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
                group["lr"] = rate


_HOOKS: dict[Optimizer, _Hooks] = {}  # of optimizers whose learning rates are lower now
