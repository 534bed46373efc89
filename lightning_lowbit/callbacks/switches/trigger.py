"""What all triggers have in common: a number of optimizer steps after which something is due.

A trigger answers alike on all ranks, and is asked before the first micro-batch of an optimizer step.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_lowbit._lightning import LightningModule, Trainer


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
