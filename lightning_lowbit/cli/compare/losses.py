"""What is read from the ``run.json`` of the runs: losses, histories, and differences of rows at the same seed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import nan
from typing import Any

Results = Mapping[str, Mapping[int, Mapping[str, Any]]]  # contents of run.json by row and seed

LOSS, RATIO = "val_loss", "gradient_noise/ratio"


def collect(runs: Any, get: Callable[[Mapping[str, Any]], float | None]) -> list[float]:
    return [value for run in runs if (value := get(run)) is not None]


def metric(run: Mapping[str, Any], name: str) -> float | None:
    """The last value; None if it was not logged, and NaN where run.json has null."""
    value = run["metrics"].get(name)
    return nan if value is None and name in run["metrics"] else value


def final_loss(run: Mapping[str, Any]) -> float | None:
    return metric(run, LOSS)


def history(run: Mapping[str, Any], name: str) -> list[tuple[float, float]]:
    return [(step, nan if value is None else value) for step, value in run["history"].get(name, [])]


def differences(results: Results, row: str, other: str) -> list[float]:
    """Final losses of a row minus those of another at the same seeds."""
    others = results.get(other, {})
    pairs = [
        (final_loss(run), final_loss(others[seed])) for seed, run in results.get(row, {}).items() if seed in others
    ]
    return [one - two for one, two in pairs if one is not None and two is not None]


def group_by_step(curves: Iterable[Sequence[tuple[float, float]]]) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for step, value in chain.from_iterable(curves):
        found.setdefault(step, []).append(value)
    return dict(sorted(found.items()))
