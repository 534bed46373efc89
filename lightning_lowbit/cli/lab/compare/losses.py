"""The numbers of finished runs: losses, histories, curves over seeds, and differences of rows at the same seed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite, nan
from statistics import median
from typing import Any

from lightning_lowbit.metrics import count_spikes

LOSS, PERPLEXITY, RATIO = "val_loss", "val_perplexity", "gradient_noise/ratio"

_MACHINE = ("device", "processes", "CPU", "threads", "python", "torch", "lightning", "lightning_lowbit")
_MOST_POINTS = 200  # of a history; a picture is about 1000 pixels wide
_FLOAT32, _POINT = 9, 6  # significant digits: of last values, as in float32, and of points of curves

History = Sequence[tuple[float, float | None]]  # (step, value), None where the value is not finite
Steps = dict[float, list[float]]  # by step, the values of the seeds


@dataclass(frozen=True)
class Finished:
    """The part of a run's ``run.json`` that tables, pictures and pages show."""

    steps: int
    seconds: float
    metrics: Mapping[str, float | None]  # the last values in validation; None where one is not finite
    history: Mapping[str, History]  # of LOSS and RATIO
    spikes: int | None  # of the training loss; None if no `loss` was logged in training
    tokens_per_second: float | None = None  # the median
    peak_memory_bytes: int | None = None
    average_bits: float | None = None
    noise_threshold: float | None = None
    phases: Sequence[tuple[int, int, str]] = ()  # (begin, end, name)
    machine: Mapping[str, str | int] = field(default_factory=dict)  # with versions, the dtype of the rest, the date
    report: str | None = None  # the page of the run, relative to the output folder


Results = Mapping[str, Mapping[int, Finished]]  # by row and seed


def reduced(run: Mapping[str, Any], report: str | None = None) -> Finished:
    """Reduces a ``run.json`` to the shown values; losses keep the digits of float32, curves six.

    Examples:
        >>> losses = {"val_loss": [[9, 2.3456789]], "loss": [[8, 2.4], [9, 2.3]]}
        >>> run = reduced({"steps": 9, "seconds": 0.5, "metrics": {"val_loss": 2.3456789}, "history": losses})
        >>> run.metrics, run.history, run.spikes
        ({'val_loss': 2.3456789}, {'val_loss': [(9, 2.34568)]}, 0)
    """
    summary, values = run.get("summary", {}), run["history"]
    names = dict.fromkeys((LOSS, PERPLEXITY, *run.get("validation_metrics", ())))
    environment = run.get("environment", {})
    machine = {name: environment[name] for name in _MACHINE if name in environment}
    machine |= {"compute_dtype": summary["compute_dtype"]} if "compute_dtype" in summary else {}
    machine |= {"date": environment["started"][:10]} if "started" in environment else {}
    losses, speeds = ([value for _, value in _with_nan(values.get(name, ()))] for name in ("loss", "tokens/s"))
    return Finished(
        steps=run["steps"],
        seconds=_rounded(run["seconds"], _POINT) or 0.0,
        metrics={name: _rounded(run["metrics"][name], _FLOAT32) for name in names if name in run["metrics"]},
        history={name: _thinned(values[name]) for name in (LOSS, RATIO) if values.get(name)},
        spikes=count_spikes(losses) if losses else None,
        tokens_per_second=_rounded(median(speeds or [nan]), _POINT),
        peak_memory_bytes=run.get("peak_memory_bytes"),
        average_bits=_rounded(summary.get("average_bits"), _FLOAT32),
        noise_threshold=summary.get("gradient_noise", {}).get("threshold"),
        phases=[(begin, end, name) for begin, end, name in run.get("phases", ())],
        machine=machine,
        report=report,
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return float(f"{value:.{digits}g}") if value is not None and isfinite(value) else None


def _with_nan(points: History) -> list[tuple[float, float]]:
    return [(step, nan if value is None else value) for step, value in points]


def _thinned(points: History) -> History:
    """Takes every 2^k-th point, from the last one back: curves of runs that end together share their steps."""
    every = 1
    while len(points) > every * _MOST_POINTS:
        every *= 2
    return [(step, _rounded(value, _POINT)) for step, value in points[::-every][::-1]]


def collect(runs: Iterable[Finished], get: Callable[[Finished], float | None]) -> list[float]:
    return [value for run in runs if (value := get(run)) is not None]


def metric(run: Finished, name: str) -> float | None:
    """Returns the last value; None if it was not logged, NaN if it is not finite."""
    value = run.metrics.get(name)
    return nan if value is None and name in run.metrics else value


def final_loss(run: Finished) -> float | None:
    return metric(run, LOSS)


def history(run: Finished, name: str) -> list[tuple[float, float]]:
    return _with_nan(run.history.get(name, ()))


def differences(results: Results, row: str, other: str) -> list[float]:
    others = results.get(other, {})
    pairs = [
        (final_loss(run), final_loss(others[seed])) for seed, run in results.get(row, {}).items() if seed in others
    ]
    return [one - two for one, two in pairs if one is not None and two is not None]


def gap_histories(results: Results, row: str, baseline: str) -> list[list[tuple[float, float]]]:
    """Subtracts the baseline's loss from that of a row at the steps that both have; a list of points per seed."""
    pairs = [(run, results[baseline][seed]) for seed, run in results[row].items() if seed in results[baseline]]
    losses = [(history(run, LOSS), dict(history(other, LOSS))) for run, other in pairs]
    return [[(step, loss - others[step]) for step, loss in points if step in others] for points, others in losses]


def group_by_step(curves: Iterable[Sequence[tuple[float, float]]]) -> Steps:
    by_step: Steps = {}
    for step, value in chain.from_iterable(curves):
        by_step.setdefault(step, []).append(value)
    return dict(sorted(by_step.items()))
