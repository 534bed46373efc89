"""The table and the pictures of a study."""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, isfinite, nan
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from lightning_lowbit.cli.lab.compare.claims import Effect, claims_table, gap_cells
from lightning_lowbit.cli.lab.compare.losses import (
    LOSS,
    PERPLEXITY,
    RATIO,
    Finished,
    Results,
    Steps,
    collect,
    final_loss,
    gap_histories,
    gaps_to,
    group_by_step,
    history,
    loss_curves,
    metric,
)
from lightning_lowbit.cli.lab.compare.power import Interval
from lightning_lowbit.report.blocks import Table
from lightning_lowbit.report.tables import as_markdown


def write_comparison(
    results: Results, baseline: str, output: Path, name: str | None = None, effects: Sequence[Effect] = ()
) -> str:
    """Writes a table and pictures into a folder; returns the table.

    ``table.md`` has the rows and the verdicts, ``loss.png`` the validation loss over steps, ``gap.png`` the gaps to the
    baseline with 95 % intervals. Rows such as ``adamw@1e-3`` with three rates or more also make ``rates.png``, the loss
    over the learning rate; measured ratios of gradient to noise make ``noise.png``, as figure 5 of FP4 All the Way
    (arXiv 2505.19115). The files of a study with a name are ``<name>.md``, ``<name>_loss.png`` and so on.
    """
    table = markdown(results, baseline)
    if effects:
        table += "\n\n" + as_markdown(claims_table(effects, results))
    (output / f"{name or 'table'}.md").write_text(table + "\n")
    prefix = f"{name}_" if name else ""
    if any(results.values()):
        _draw_losses(results, output / f"{prefix}loss.png")
        _draw_gaps(results, baseline, output / f"{prefix}gap.png")
    curves = _rate_curves(results)
    if any(len(curve) >= 3 for curve in curves.values()):
        _draw_rates(curves, output / f"{prefix}rates.png")
    if any(history(run, RATIO) for runs in results.values() for run in runs.values()):
        _draw_noise(results, baseline, output / f"{prefix}noise.png")
    return table


def markdown(results: Results, baseline: str) -> str:
    """Returns the table as markdown, with a column for each metric of the validation.

    ``±`` is the standard deviation over seeds. Gaps are paired by seed, with the 95 % interval of their mean.
    """
    names = dict.fromkeys(name for runs in results.values() for run in runs.values() for name in run.metrics)
    others = [name for name in names if name not in (LOSS, PERPLEXITY)]
    gap = [f"gap to {baseline}", "95 % interval"]
    header = ["run", "seeds", "loss", "perplexity", *others, *gap, "spikes", "tokens/s", "peak memory", "bits"]
    gaps, lines = gaps_to(baseline, results), []
    for row, by_seed in results.items():
        runs = list(by_seed.values())
        memory = collect(runs, lambda run: run.peak_memory_bytes)
        cells = [
            _spread(collect(runs, final_loss)),
            _spread(_last_values(runs, PERPLEXITY), 3),
            *(_spread(_last_values(runs, name)) for name in others),
            *(["baseline", ""] if row == baseline else gap_cells(gaps.get(row, []))),
            _spread(collect(runs, lambda run: run.spikes), 1),
            _spread(collect(runs, lambda run: run.tokens_per_second), 0),
            f"{max(memory) / 2**30:.2f} GiB" if memory else "",
            _spread(collect(runs, lambda run: run.average_bits), 2),
        ]
        lines.append([row, str(len(runs)), *cells])
    return as_markdown(Table(header, lines))


def _last_values(runs: Sequence[Finished], name: str) -> list[float]:
    return collect(runs, lambda run: metric(run, name))


def _spread(values: Sequence[float], digits: int = 4) -> str:
    if not values:
        return ""
    center = f"{mean(values):,.{digits}f}"
    if len(values) == 1 or not all(map(isfinite, values)):
        return center
    return f"{center} ± {stdev(values):,.{digits}f}"


def _rate_curves(results: Results) -> dict[str, dict[float, list[float]]]:
    """Groups the losses of the seeds by a row's name without its learning rate, then by ascending rate."""
    curves: dict[str, dict[float, list[float]]] = {}
    for row, runs in results.items():
        match = re.fullmatch(r"(.+)(?:@|,lr=)((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", row, re.IGNORECASE)
        losses = collect(runs.values(), final_loss)
        if match and losses and 0 < float(match[2]) < inf:
            curves.setdefault(match[1], {}).setdefault(float(match[2]), []).extend(losses)
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


# Axes are cut, because one diverging row would flatten all others: losses at this multiple of the highest loss of the
# row that stays lowest, and gaps at this multiple of the median gap.
_HIGHEST_LOSS, _WIDEST_GAP = 1.5, 10.0


@contextmanager
def _picture(path: Path, height: float, rows: int = 1, lines: str = "both") -> Generator[list[Any], None, None]:
    """Yields axes below each other, then adds their grids and a legend of the labeled lines, and writes the file."""
    from matplotlib.figure import Figure  # an optional package

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0])
    yield axes
    if any(part.get_legend_handles_labels()[0] for part in axes):
        figure.legend(loc="outside right upper", frameon=False)
    for part in axes:
        part.grid(axis=lines, alpha=0.3)
    figure.savefig(path, dpi=150)


def _style(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}


def _draw_band(axes: Any, by_step: Steps, style: Mapping[str, Any], alpha: float, label: str | None) -> None:
    means, low, high = ([function(values) for values in by_step.values()] for function in (mean, min, max))
    axes.plot(list(by_step), means, label=label, **style)
    axes.fill_between(list(by_step), low, high, color=style["color"], alpha=alpha, linewidth=0)


def _cut_losses(axes: Any, lines: Sequence[Sequence[float]]) -> str:
    """Cuts the axis at losses that dwarf the others; returns a remark for the label."""
    ranges = [(min(finite), max(finite)) for losses in lines if (finite := list(filter(isfinite, losses)))]
    if not ranges:
        return ""
    bottom, top = (min(ends) for ends in zip(*ranges, strict=True))
    top += (_HIGHEST_LOSS - 1) * abs(top)
    if max(high for _, high in ranges) <= top:
        return ""
    axes.set_ylim(bottom - 0.05 * (top - bottom), top)
    return f"\nwhat is above {top:.3g} is cut off"


def _draw_losses(results: Results, path: Path) -> None:
    curves, numbers = loss_curves(results), {row: number for number, row in enumerate(results)}
    with _picture(path, 4.5) as (axes,):
        for row, by_step in curves.items():
            label = row if isfinite([*by_step.values()][-1][0]) else f"{row} (diverged)"
            _draw_band(axes, by_step, _style(numbers[row]), 0.2, label)
        lines = [[value for values in by_step.values() for value in values] for by_step in curves.values()]
        label = "validation loss (mean and range over seeds)" + _cut_losses(axes, lines)
        axes.set(xlabel="optimizer step", ylabel=label)


def _draw_gaps(results: Results, baseline: str, path: Path) -> None:
    gaps, order = gaps_to(baseline, results), list(results)
    names: list[str] = []
    ends: list[float] = []  # of the intervals
    with _picture(path, 1.2 + 0.4 * len(gaps), lines="x") as (axes,):
        for position, (row, values) in enumerate(gaps.items()):
            finite = list(filter(isfinite, values))
            diverged = len(finite) < len(values)
            if not diverged:
                color = _style(order.index(row))["color"]  # as in loss.png
                axes.barh(position, mean(values), height=0.6, alpha=0.4, color=color)
            axes.plot(finite, [position] * len(finite), "o", color="black", markersize=4)
            if interval := Interval.of(values):
                axes.plot([interval.low, interval.high], [position] * 2, "|-", color="black", linewidth=1)
                ends += [abs(interval.low), abs(interval.high)]
            names.append(f"{row}   {'diverged' if diverged else f'{mean(values):+.3g}'}")
        label = f"final validation loss minus that of {baseline}, same seed (dots: seeds; lines: 95 % intervals)"
        sizes = [abs(value) for values in gaps.values() for value in values if isfinite(value)]
        if sizes and max(sizes + ends) > (limit := _WIDEST_GAP * median(sizes)) > 0:
            low, high = axes.get_xlim()
            axes.set_xlim(max(low, -limit), min(high, limit))
            label += f"\nwhat is beyond {limit:.3g} is cut off"
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(xlabel=label)


def _draw_rates(curves: Mapping[str, Mapping[float, Sequence[float]]], path: Path) -> None:
    rates = sorted({rate for curve in curves.values() for rate in curve})
    top = 0.98  # height of the crosses, as a share of the axes
    with _picture(path, 4.5) as (axes,):
        for number, (name, curve) in enumerate(curves.items()):
            style = _style(number)
            means = [mean(losses) if all(map(isfinite, losses)) else nan for losses in curve.values()]  # NaN: a gap
            axes.plot(list(curve), means, label=name, **style)
            if dots := [(rate, loss) for rate, losses in curve.items() for loss in losses if isfinite(loss)]:
                axes.plot(*zip(*dots, strict=True), "o", color=style["color"], markersize=4, alpha=0.6)
            if diverged := [rate for rate, value in zip(curve, means, strict=True) if not isfinite(value)]:
                crosses = [top] * len(diverged)
                axes.plot(diverged, crosses, "x", color=style["color"], transform=axes.get_xaxis_transform())
                top -= 0.04
                for last in [rate for rate in curve if rate < diverged[0]][-1:]:
                    axes.axvline(last, color=style["color"], linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        lines = [[loss for losses in curve.values() for loss in losses] for curve in curves.values()]
        label = "final validation loss (mean over seeds; dots: seeds)" + _cut_losses(axes, lines)
        axes.set(xlabel="learning rate (×: a seed diverged; dotted: the last rate before)", ylabel=label)


def _draw_noise(results: Results, baseline: str, path: Path) -> None:
    thresholds = {run.noise_threshold for runs in results.values() for run in runs.values()} - {None}
    with _picture(path, 6, rows=2) as (above, below):
        for number, (row, runs) in enumerate(results.items()):
            ratios = [history(run, RATIO) for run in runs.values()]
            gaps = gap_histories(results, row, baseline) if row != baseline else []
            for axes, curves in ((above, ratios), (below, gaps)):
                finite = ([(step, value) for step, value in curve if isfinite(value)] for curve in curves)
                if by_step := group_by_step(finite):
                    _draw_band(axes, by_step, _style(number), 0.15, row if axes is below else None)
            for begin in [begin for run in runs.values() for begin, *_ in run.phases[1:]]:
                for axes in (above, below):
                    axes.axvline(begin, color=_style(number)["color"], linestyle=":", linewidth=1)
        for threshold in thresholds:
            above.axhline(threshold, color="black", linewidth=0.8)
            above.annotate(f"{threshold:.3g}", (1, threshold), xycoords=("axes fraction", "data"), va="center")
        below.axhline(0, color="black", linewidth=0.8)
        above.set_yscale("log")
        above.set(ylabel="gradient over quantization noise")
        label = f"validation loss minus that of {baseline}"
        below.set(xlabel="optimizer step (dotted: a change of phase)", ylabel=label)
