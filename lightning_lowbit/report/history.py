"""The metrics of a run over its optimizer steps: recorded without waiting for a device, bounded, resumable."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MOST_POINTS = 2000  # of a metric; beyond it is thinned to half
MOST_OF_LAYERS = 200_000  # of all metrics of layers (quantity/operand/layer) together, of which there are many
# Values on the device, which are lost if it fails: so many, or, of hundreds of metrics, those of so many steps.
_MOST_PENDING, _STEPS_PENDING = 200, 4


class History:
    """Points (step, value) by metric, and the phases. Values stay on their device until somebody asks for numbers."""

    def __init__(self) -> None:
        self.phases: list[tuple[int, int, str]] = []
        self.extremes: dict[str, tuple[float, float]] = {}  # lowest and highest, whatever is thinned
        self.quantities: dict[str, str] = {}  # of the metrics of `add_layers`, what they measure
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._pending: list[tuple[str, int, Tensor]] = []
        self._last: dict[str, int] = {}

    def add(self, name: str, step: int, value: Tensor) -> bool:
        """Adds a value; of several values of one step the first holds."""
        if step <= self._last.get(name, -1):
            return False
        self._last[name] = step
        self._pending.append((name, step, value.detach().reshape(()).clone()))
        if len(self._pending) >= max(_MOST_PENDING, _STEPS_PENDING * len(self._last)):
            self._convert()
        return True

    def add_layers(self, numbers: Mapping[str, Mapping[str, float]], step: int) -> None:
        """Adds numbers of layers, by quantity and layer, that are on the host already."""
        for quantity, row in numbers.items():
            for layer, number in row.items():
                name = f"{quantity}/{layer}"
                if step > self._last.get(name, -1):
                    self.quantities[name], self._last[name] = quantity, step
                    self._append(name, step, number)

    def add_phase(self, phase: str, begin: int, step: int) -> None:
        """Adds the phase of optimizer step ``step``; ``begin`` steps had been done before the first one."""
        start, end, last = self.phases[-1] if self.phases else (begin, begin, phase)
        if step > end:
            self.phases[-1:] = [(start, step, phase)] if phase == last else [(start, end, last), (end, step, phase)]

    def points(self) -> dict[str, list[tuple[int, float]]]:
        """All points."""
        self._convert()
        return self._points

    def _convert(self) -> None:
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, (_, _, value) in enumerate(self._pending):
            alike.setdefault((value.device, value.dtype), []).append(i)
        values: dict[int, float] = {}
        for indices in alike.values():  # one copy to the host for each
            values.update(zip(indices, torch.stack([self._pending[i][2] for i in indices]).tolist(), strict=True))
        for i, (name, step, _) in enumerate(self._pending):
            self._append(name, step, float(values[i]))
        self._pending.clear()

    def _append(self, name: str, step: int, number: float) -> None:
        points = self._points.setdefault(name, [])
        points.append((step, number))
        if len(points) > (most := self._most_of_layers() if self._is_of_layer(name) else MOST_POINTS):
            self._points[name] = thin(points, most)
        if math.isfinite(number):
            low, high = self.extremes.get(name, (number, number))
            self.extremes[name] = (min(low, number), max(high, number))

    def _is_of_layer(self, name: str) -> bool:
        return name in self.quantities or name.count("/") > 1

    def _most_of_layers(self) -> int:
        layers = sum(map(self._is_of_layer, self._last))
        return min(MOST_POINTS, max(100, MOST_OF_LAYERS // max(layers, 1)))

    def drop_pending(self) -> None:
        """Gives up the values that are still on a device."""
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """As tensors and primitives."""
        points = {name: torch.tensor(points, dtype=torch.float64) for name, points in self.points().items()}
        return {"points": points, "phases": list(self.phases), "extremes": dict(self.extremes)} | (
            {"quantities": dict(self.quantities)} if self.quantities else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the points of a checkpoint."""
        self._pending = []
        self._points = {name: [(int(x), y) for x, y in table.tolist()] for name, table in state["points"].items()}
        self._last = {name: points[-1][0] for name, points in self._points.items()}
        self.phases, self.extremes = list(state["phases"]), dict(state["extremes"])
        self.quantities = dict(state.get("quantities", {}))  # which older checkpoints lack


def thin(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """About half of ``most`` points, evenly spaced in steps, the first and the last among them."""
    spacing = (points[-1][0] - points[0][0]) / (most // 2)
    kept = points[:1]
    for point in points[1:-1]:
        if point[0] - kept[-1][0] >= spacing:
            kept.append(point)
    return [*kept, points[-1]]
