"""Learning rates that are lowered within ``optimizer.step()`` alone, unseen by schedules and checkpoints."""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch.optim import Optimizer


class LowerRates:
    """Multiplies the learning rates of an optimizer within its steps by ``factor``, which may be set between steps.

    Examples:
        >>> lower = LowerRates(optimizer, 0.5)
        >>> optimizer.step()
        >>> lower.release()
    """

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self.factor = factor
        self._hooks = _HOOKS.get(optimizer) or _Hooks(optimizer)
        self._hooks.add(self)

    def release(self) -> None:
        """Restores the learning rates for good, also after a step that raised."""
        self._hooks.remove(self)


class Rewarm:
    """Raises the learning rate linearly to that of the schedule: the i-th step has i / ``steps`` of it."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._lowered: list[LowerRates] = []

    def follow(self, optimizers: Sequence[Optimizer], taken: int) -> None:
        """Sets the factor of the next step, ``taken`` steps after the first; a negative ``taken`` means no factor."""
        factor = 1.0 if taken < 0 else min(1.0, (taken + 1) / self._steps)
        if factor == 1:
            self.release()
        elif not self._lowered:
            self._lowered = [LowerRates(optimizer, factor) for optimizer in optimizers]
        for lowered in self._lowered:
            lowered.factor = factor

    def release(self) -> None:
        """Ends or interrupts the ramp; :meth:`follow` may start it again."""
        for lowered in self._lowered:
            lowered.release()
        self._lowered = []


class _Hooks:
    """The only pair of step hooks of an optimizer: torch runs post-hooks in registration order, so two do not nest."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._lower_rates: list[LowerRates] = []
        self._handles: list[Any] = []
        self._rates: list[Any] = []
        self._depth = 0  # torch calls the hooks again if step() calls the base class's step()

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


_HOOKS: dict[Optimizer, _Hooks] = {}  # of optimizers with lowered learning rates
