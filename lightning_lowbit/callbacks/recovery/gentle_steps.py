"""Optimizer steps after a rollback with lower learning rates and a phase of higher precision."""

from typing import Any, ClassVar

from lightning_lowbit._lightning import Trainer
from lightning_lowbit.callbacks.learning_rates import LowerRates
from lightning_lowbit.precision import LowBitPrecision


class GentleSteps:
    """Lowers learning rates and sets a temporary phase of ``owner`` until the step ``until``; None when inactive."""

    saved: ClassVar[Any] = {"until": int | None, "phase_before": str | None, "is_phase_ours": bool}

    def __init__(self, owner: str, lr_factor: float, phase: str | None) -> None:
        self.until: int | None = None
        self._owner, self._lr_factor, self._phase = owner, lr_factor, phase
        self._phase_before: str | None = None
        self._loaded: bool | None = None  # from a checkpoint: whether the phase was still ours
        self._plugin: LowBitPrecision | None = None
        self._lowered: list[LowerRates] = []

    def begin(self, trainer: Trainer, until: int) -> None:
        self.end()
        self.until = until
        self._find_plugin(trainer)
        if self._plugin is not None:
            self._phase_before = self._plugin.phase
            self._plugin.push_phase(self._owner, self._phase)
        self._lower_rates(trainer)

    def resume(self, trainer: Trainer) -> None:
        """When training starts: continues what was in force when training ended or the checkpoint was saved."""
        loaded, self._loaded = self._loaded, None
        self._find_plugin(trainer)
        if self.until is None:
            return
        if (plugin := self._plugin) is not None and (plugin.has_pushed(self._owner) if loaded is None else loaded):
            if loaded and self._phase is not None and self._phase_before is not None:
                plugin.set_phase(self._phase_before)  # the plugin restored the temporary phase
            plugin.push_phase(self._owner, self._phase)
        self._lower_rates(trainer)

    def suspend(self) -> None:
        """When training ends: restores phase and learning rates, until :meth:`resume`."""
        if self.until is not None and self._plugin is not None and self._plugin.has_pushed(self._owner):
            self._plugin.push_phase(self._owner, None)
        self.release_rates()

    def end(self) -> None:
        if self.until is not None and self._plugin is not None:
            self._plugin.pop_phase(self._owner)
        self.until = None
        self.release_rates()

    def release_rates(self) -> None:
        for lowered in self._lowered:
            lowered.release()
        self._lowered = []

    def _find_plugin(self, trainer: Trainer) -> None:
        self._plugin = trainer.precision_plugin if isinstance(trainer.precision_plugin, LowBitPrecision) else None

    def _lower_rates(self, trainer: Trainer) -> None:
        if self._lr_factor < 1:
            self._lowered = [LowerRates(optimizer, self._lr_factor) for optimizer in trainer.optimizers]

    def state(self) -> dict[str, Any]:
        is_ours = self._loaded
        if is_ours is None:
            is_ours = self._plugin is None or self._plugin.has_pushed(self._owner)
        is_ours = self.until is not None and is_ours
        return {"until": self.until, "phase_before": self._phase_before, "is_phase_ours": is_ours}

    def load(self, state: dict[str, Any]) -> None:
        self.until, self._phase_before = state["until"], state["phase_before"]
        self._loaded = state["is_phase_ours"]
