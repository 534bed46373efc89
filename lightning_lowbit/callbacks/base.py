"""The base class of all callbacks of this package, with the refusals that several of them share."""

from typing import Any, ClassVar

from lightning_lowbit._lightning import (
    Callback,
    DeepSpeedStrategy,
    LightningModule,
    MisconfigurationException,
    Trainer,
    check_trainer,
)
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.saved_state import check_state


class LowBitCallback(Callback):
    """A callback that refuses the Trainer of the other Lightning package (``lightning`` or ``pytorch_lightning``).

    ``saved`` is the kind of its ``state_dict``, see :mod:`lightning_lowbit.saved_state`; subclasses with a state give
    it, and implement :meth:`_load`.
    """

    saved: ClassVar[Any] = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a ``state_dict``; a damaged one raises a ``ValueError`` and changes nothing."""
        check_state(type(self).__name__, state_dict, self.saved)
        self._load(state_dict)

    def _load(self, state: dict[str, Any]) -> None:
        """Takes a state that has been checked."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the Trainer, and forgets an earlier run. Subclasses call ``super()`` first."""
        check_trainer(self, trainer)
        self._refuse_second(trainer)
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.global_step == 0:  # else the same Trainer continues; checkpoints load later
            self._start_afresh()

    def _start_afresh(self) -> None:
        """Resets the state of a run."""

    def _refuse_second(self, trainer: Trainer) -> None:
        """Refuses callbacks that share a state: of those of ``configure_callbacks``, Lightning saves the last one's."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        same = sum(callback.state_key == self.state_key for callback in callbacks)
        if same > 1 and type(self).state_dict is not Callback.state_dict:
            raise MisconfigurationException(
                f"{type(self).__name__} keeps one state in checkpoints, and the Trainer has {same} of them. Leave one, "
                "in Trainer(callbacks=...) or in configure_callbacks."
            )

    def _needs_plugin(self, trainer: Trainer) -> LowBitPrecision:
        if isinstance(plugin := trainer.precision_plugin, LowBitPrecision):
            return plugin
        raise MisconfigurationException(
            f"{type(self).__name__} needs a LowBitPrecision plugin, but the Trainer has {type(plugin).__name__}. Use "
            "e.g. Trainer(plugins=[FP4Precision()]), or leave out the callback."
        )

    def _needs_automatic_optimization(self, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(self).__name__} needs to know what belongs to an optimizer step, which in manual optimization "
                "only training_step does. Use automatic optimization, or leave out the callback."
            )

    def _refuse_deepspeed(self, trainer: Trainer, instead: str = "leave out the callback") -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                f"{type(self).__name__} needs gradients and states of optimizers, which DeepSpeed keeps to itself: "
                f"{instead}, or train with DDP, FSDPStrategy or ModelParallelStrategy."
            )
