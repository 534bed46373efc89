"""The table and the pictures of a study, from what its runs left."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from lightning_lowbit.metrics import count_spikes

Results = Mapping[str, Mapping[int, Mapping[str, Any]]]  # by row and seed, what run.json holds

LOSS = "val_loss"


def write_comparison(results: Results, baseline: str, output: Path) -> str:
    """Writes ``table.md``, ``loss.png`` and ``gap.png`` into a folder; returns the table."""
    table = markdown(results, baseline)
    (output / "table.md").write_text(table + "\n")
    if any(results.values()):
        _picture_losses(results, output / "loss.png")
        _picture_gaps(results, baseline, output / "gap.png")
    return table


def markdown(results: Results, baseline: str) -> str:
    """A row for each combination; ``±`` is the standard deviation over seeds, gaps are paired by seed."""
    header = ["run", "seeds", "loss", "perplexity", f"gap to {baseline}", "spikes", "tokens/s", "peak memory", "bits"]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for row, runs in results.items():
        memory = _values(runs.values(), lambda run: run["peak_memory_bytes"] / 2**30)
        lines.append(
            [
                row,
                str(len(runs)),
                _spread(_values(runs.values(), _loss)),
                _spread(_values(runs.values(), lambda run: _metric(run, "val_perplexity")), 3),
                "baseline" if row == baseline else _spread(_gaps(runs, results[baseline]), 4, signed=True),
                _spread(_values(runs.values(), _spikes), 1),
                _spread(_values(runs.values(), _speed), 0),
                f"{max(memory):.2f} GiB" if memory else "",
                _spread(_values(runs.values(), lambda run: run.get("summary", {}).get("average_bits")), 2),
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _values(runs: Any, get: Callable[[Mapping[str, Any]], float | None]) -> list[float]:
    return [value for run in runs if (value := get(run)) is not None]


def _metric(run: Mapping[str, Any], name: str) -> float | None:
    """None where it was not logged; run.json has null where it is not finite."""
    value = run["metrics"].get(name)
    return nan if value is None and name in run["metrics"] else value


def _loss(run: Mapping[str, Any]) -> float | None:
    return _metric(run, LOSS)


def _history(run: Mapping[str, Any], name: str) -> list[tuple[float, float]]:
    return [(step, nan if value is None else value) for step, value in run["history"].get(name, [])]


def _spikes(run: Mapping[str, Any]) -> float:
    return count_spikes([value for _, value in _history(run, "loss")])


def _speed(run: Mapping[str, Any]) -> float | None:
    rates = [value for _, value in _history(run, "tokens/s")]
    return median(rates) if rates else None


def _gaps(runs: Mapping[int, Mapping[str, Any]], baseline: Mapping[int, Mapping[str, Any]]) -> list[float]:
    pairs = [(_loss(run), _loss(baseline[seed])) for seed, run in runs.items() if seed in baseline]
    return [loss - other for loss, other in pairs if loss is not None and other is not None]


def _spread(values: Sequence[float], digits: int = 4, signed: bool = False) -> str:
    if not values:
        return ""
    sign = "+" if signed else ""
    center = f"{mean(values):{sign},.{digits}f}"
    if len(values) == 1 or not all(map(isfinite, values)):
        return center
    return f"{center} ± {stdev(values):,.{digits}f}"


# --- pictures ---------------------------------------------------------------------------------------------------------


def _picture_losses(results: Results, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (row, runs) in enumerate(results.items()):
        color = f"C{number}"
        by_step: dict[float, list[float]] = {}
        for run in runs.values():
            for step, value in _history(run, LOSS):
                by_step.setdefault(step, []).append(value)
        steps = sorted(by_step)
        if steps:
            axes.plot(steps, [mean(by_step[step]) for step in steps], label=row, color=color)
            low, high = ([f(by_step[step]) for step in steps] for f in (min, max))
            axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set(xlabel="optimizer step", ylabel="validation loss (mean and range over seeds)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _picture_gaps(results: Results, baseline: str, path: Path) -> None:
    from matplotlib.figure import Figure

    rows = [row for row in results if row != baseline and _gaps(results[row], results[baseline])]
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for position, row in enumerate(rows):
        gaps = _gaps(results[row], results[baseline])
        color = f"C{list(results).index(row)}"  # as in the other picture
        axes.barh(position, mean(gaps), height=0.6, alpha=0.4, color=color)
        axes.plot(gaps, [position] * len(gaps), "o", color="black", markersize=4)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel=f"final validation loss minus that of {baseline}, same seed (dots: seeds)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)
