"""Training losses by optimizer step, copied to the host asynchronously."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit._lightning import Trainer
from lightning_lowbit.distributed import local


class StepLoss(NamedTuple):
    """The loss of the optimizer step after ``step`` steps, on its way to the host (``arrived``; None on the CPU).

    ``values`` is float32 ``[2]``: the sum over micro-batches and ranks, and their number.
    """

    step: int
    values: Tensor
    arrived: torch.Event | None = None

    def read(self) -> float | None:
        """Waits for the copy and returns the mean; None if no training step returned a loss."""
        if self.arrived is not None:
            self.arrived.synchronize()
        total, count = self.values.tolist()
        return total / count if count else None


class StepLosses:
    """Sums losses of micro-batches; ``pending`` holds the steps whose loss has not been read, in order."""

    def __init__(self) -> None:
        self.pending: deque[StepLoss] = deque()
        self._micro_batches: list[Tensor] = []

    def begin_step(self) -> None:
        self._micro_batches = []

    def add(self, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):  # otherwise training_step returned None
            self._micro_batches.append(local(loss).detach().float().reshape(()))

    def end_step(self, trainer: Trainer) -> None:
        # Lightning divides each loss by accumulate_grad_batches, but the last step of an epoch may have fewer
        # micro-batches. A rank without losses must still take part in the collective.
        none = torch.zeros((), device=trainer.strategy.root_device)
        total = sum(self._micro_batches, none) * trainer.accumulate_grad_batches
        values = torch.stack([total, none + len(self._micro_batches)])
        self._micro_batches = []
        values, arrived = trainer.strategy.reduce(values, reduce_op="sum"), None
        if values.device.type != "cpu":
            arrived = torch.Event(values.device)
            values = values.to("cpu", non_blocking=True)
            arrived.record()
        self.pending.append(StepLoss(trainer.global_step - 1, values, arrived))

    def read(self, leave: int = 0) -> Iterator[tuple[int, float]]:
        """Removes the oldest losses except the last few; yields (step, loss) of steps with a loss."""
        while len(self.pending) > leave:
            oldest = self.pending.popleft()
            if (loss := oldest.read()) is not None:
                yield oldest.step, loss

    def state(self) -> list[tuple[int, float | None]]:
        return [(loss.step, loss.read()) for loss in self.pending]

    def load(self, state: Iterable[tuple[int, float | None]]) -> None:
        values = [(step, [0.0, 0.0] if loss is None else [loss, 1.0]) for step, loss in state]
        self.pending = deque(StepLoss(step, torch.tensor(pair, device="cpu")) for step, pair in values)
