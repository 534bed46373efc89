"""Records the metrics of a run by optimizer step: without waiting for the device, bounded in size, resumable."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_lowbit._lightning import Trainer
from lightning_lowbit.saved_state import NUMBER

MOST_POINTS = 2000  # of a metric; more are thinned to half


def _is_table(value: object) -> bool:
    """a tensor of points [points, 2], with one at least"""
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == 2 and len(value) > 0


class History:
    """Points (step, value) by metric, and phases by step. Values are copied to the host in batches.

    Args:
        most_of_layers: points of all metrics of layers (quantity/operand/layer) together.
        most_pending: values that are copied together, if these are not of fewer steps than the next argument.
        steps_pending: steps whose values are copied together, where there are hundreds of metrics.
    """

    saved: ClassVar[Any] = {
        "points": {str: _is_table},
        "phases": [(int, int, str)],
        "extremes": {str: (NUMBER, NUMBER)},
        "quantities?": {str: str},
    }

    def __init__(self, most_of_layers: int = 200_000, most_pending: int = 200, steps_pending: int = 4) -> None:
        self._most_of_layers, self._most_pending, self._steps_pending = most_of_layers, most_pending, steps_pending
        self.phases: list[tuple[int, int, str]] = []
        self.extremes: dict[str, tuple[float, float]] = {}  # lowest and highest of all values, before thinning
        self.quantities: dict[str, str] = {}  # of the metrics of `add_layers`, by name
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._pending: list[tuple[str, int, Tensor]] = []
        self._last: dict[str, int] = {}

    def add(self, name: str, step: int, value: Tensor) -> bool:
        if step <= self._last.get(name, -1):
            return False
        self._last[name] = step
        self._pending.append((name, step, value.detach().reshape(()).clone()))
        if len(self._pending) >= max(self._most_pending, self._steps_pending * len(self._last)):
            self._convert()
        return True

    def add_layers(self, numbers: Mapping[str, Mapping[str, float]], step: int) -> None:
        for quantity, row in numbers.items():
            for layer, number in row.items():
                name = f"{quantity}/{layer}"
                if step > self._last.get(name, -1):
                    self.quantities[name], self._last[name] = quantity, step
                    self._append(name, step, number)

    def add_phase(self, phase: str, begin: int, step: int) -> None:
        """Adds the phase of an optimizer step; the first phase starts after ``begin`` steps of an earlier run."""
        start, end, last = self.phases[-1] if self.phases else (begin, begin, phase)
        if step > end:
            self.phases[-1:] = [(start, step, phase)] if phase == last else [(start, end, last), (end, step, phase)]

    def points(self) -> dict[str, list[tuple[int, float]]]:
        self._convert()
        return self._points

    def _convert(self) -> None:
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, (_, _, value) in enumerate(self._pending):
            alike.setdefault((value.device, value.dtype), []).append(i)
        values: dict[int, float] = {}
        for indices in alike.values():  # one copy to the host per device and dtype
            values.update(zip(indices, torch.stack([self._pending[i][2] for i in indices]).tolist(), strict=True))
        for i, (name, step, _) in enumerate(self._pending):
            self._append(name, step, float(values[i]))
        self._pending.clear()

    def _append(self, name: str, step: int, number: float) -> None:
        points = self._points.setdefault(name, [])
        points.append((step, number))
        most = MOST_POINTS
        if self._is_of_layer(name):
            most = min(MOST_POINTS, max(100, self._most_of_layers // max(sum(map(self._is_of_layer, self._last)), 1)))
        if len(points) > most:
            self._points[name] = thin(points, most)
        if math.isfinite(number):
            low, high = self.extremes.get(name, (number, number))
            self.extremes[name] = (min(low, number), max(high, number))

    def _is_of_layer(self, name: str) -> bool:
        return name in self.quantities or name.count("/") > 1

    def drop_pending(self) -> None:
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        points = {name: torch.tensor(points, dtype=torch.float64) for name, points in self.points().items()}
        state = {"points": points, "phases": list(self.phases), "extremes": dict(self.extremes)}
        return state | ({"quantities": dict(self.quantities)} if self.quantities else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending = []
        self._points = {name: [(int(x), y) for x, y in table.tolist()] for name, table in state["points"].items()}
        self._last = {name: points[-1][0] for name, points in self._points.items()}
        self.phases, self.extremes = list(state["phases"]), dict(state["extremes"])
        self.quantities = dict(state.get("quantities", {}))  # older checkpoints have none


def thin(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    spacing = (points[-1][0] - points[0][0]) / (most // 2)
    result = points[:1]
    for point in points[1:-1]:
        if point[0] - result[-1][0] >= spacing:
            result.append(point)
    return [*result, points[-1]]


def scalars(metrics: Mapping[str, Any]) -> dict[str, Tensor]:
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in metrics.items()}
    return {name: value for name, value in local.items() if isinstance(value, Tensor) and value.numel() == 1}


def learning_rates(trainer: Trainer) -> Iterable[tuple[str, Tensor]]:
    """Yields (name, rate) of an optimizer's first group and of groups with another rate, as ``LearningRateMonitor``."""
    used: Counter[str] = Counter()
    for optimizer in trainer.optimizers:
        name = f"lr-{type(optimizer).__name__}"
        used[name] += 1
        name += f"-{used[name] - 1}" if used[name] > 1 else ""
        rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
        for i, rate in enumerate(rates):
            if i == 0 or rate is not rates[0] and (isinstance(rate, Tensor) or rate != rates[0]):
                value = rate.detach().clone() if isinstance(rate, Tensor) else torch.tensor(rate, dtype=torch.float64)
                yield f"{name}/pg{i + 1}" if i else name, value
