"""Learning rates that are lowered within ``optimizer.step()`` alone, unseen by schedules and checkpoints."""

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

from torch.optim import Optimizer

from lightning_lowbit._lightning import Trainer
from lightning_lowbit.precision import LowBitPrecision


class LowerRates:
    """Multiplies the learning rates of optimizers within their steps; factors of several users multiply.

    Examples:
        >>> lower = LowerRates()
        >>> lower.by(0.5, [optimizer])
        >>> optimizer.step()
        >>> lower.release()
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._hooks: list[_Hooks] = []

    def by(self, factor: float, optimizers: Sequence[Optimizer]) -> None:
        """Sets the factor of the next steps; 1 releases the optimizers."""
        self.factor = factor
        if factor == 1:
            self.release()
        elif not self._hooks:
            self._hooks = [_HOOKS.get(optimizer) or _Hooks(optimizer) for optimizer in optimizers]
            for hooks in self._hooks:
                hooks.users.append(self)

    def release(self) -> None:
        """Restores the learning rates, also after a step that raised."""
        for hooks in self._hooks:
            hooks.remove(self)
        self._hooks = []


class GentleSteps:
    """Lowers learning rates and sets a temporary phase of ``owner`` until the step ``until``; None when inactive."""

    saved: ClassVar[Any] = {"until": int | None, "phase_before": str | None, "is_phase_ours": bool}

    def __init__(self, owner: str, lr_factor: float, phase: str | None) -> None:
        self.until: int | None = None
        self._owner, self._lr_factor, self._phase = owner, lr_factor, phase
        self._phase_before: str | None = None
        self._loaded: bool | None = None  # from a checkpoint: True if the phase was still ours
        self._plugin: LowBitPrecision | None = None
        self.rates = LowerRates()

    def begin(self, trainer: Trainer, until: int) -> None:
        self.end()
        self.until = until
        self._find_plugin(trainer)
        if self._plugin is not None:
            self._phase_before = self._plugin.phase
            self._plugin.push_phase(self._owner, self._phase)
        self.rates.by(self._lr_factor, trainer.optimizers)

    def resume(self, trainer: Trainer) -> None:
        """Continues, when training starts, the steps that the end of training or a checkpoint interrupted."""
        loaded, self._loaded = self._loaded, None
        self._find_plugin(trainer)
        if self.until is None:
            return
        if (plugin := self._plugin) is not None and (plugin.has_pushed(self._owner) if loaded is None else loaded):
            if loaded and self._phase is not None and self._phase_before is not None:
                plugin.set_phase(self._phase_before)  # the plugin restored the temporary phase
            plugin.push_phase(self._owner, self._phase)
        self.rates.by(self._lr_factor, trainer.optimizers)

    def suspend(self) -> None:
        """Restores phase and learning rates when training ends, until :meth:`resume`."""
        if self.until is not None and self._plugin is not None and self._plugin.has_pushed(self._owner):
            self._plugin.push_phase(self._owner, None)
        self.rates.release()

    def end(self) -> None:
        if self.until is not None and self._plugin is not None:
            self._plugin.pop_phase(self._owner)
        self.until = None
        self.rates.release()

    def _find_plugin(self, trainer: Trainer) -> None:
        self._plugin = trainer.precision_plugin if isinstance(trainer.precision_plugin, LowBitPrecision) else None

    def state(self) -> dict[str, Any]:
        is_ours = self._loaded
        if is_ours is None:
            is_ours = self._plugin is None or self._plugin.has_pushed(self._owner)
        is_ours = self.until is not None and is_ours
        return {"until": self.until, "phase_before": self._phase_before, "is_phase_ours": is_ours}

    def load(self, state: dict[str, Any]) -> None:
        self.until, self._phase_before = state["until"], state["phase_before"]
        self._loaded = state["is_phase_ours"]


class _Hooks:
    """The only pair of step hooks of an optimizer: torch runs post-hooks in registration order, so two do not nest."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._lower),
            optimizer.register_step_post_hook(self._restore),
        ]
        self.users: list[LowerRates] = []
        self._rates: list[Any] = []
        self._depth = 0  # torch calls the hooks again if step() calls the base class's step()
        _HOOKS[optimizer] = self

    def remove(self, user: LowerRates) -> None:
        self.users.remove(user)
        if self._depth:
            self._depth = 1
            self._restore()
        if not self.users:
            for handle in self._handles:
                handle.remove()
            del _HOOKS[self._optimizer]

    def _lower(self, *_: Any) -> None:
        self._depth += 1
        factor = prod(user.factor for user in self.users)
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
