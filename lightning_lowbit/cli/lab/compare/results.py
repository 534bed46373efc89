"""The table and the pictures of a study."""

import re
from collections.abc import Mapping, Sequence
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
    collect,
    differences,
    final_loss,
    group_by_step,
    history,
    metric,
)
from lightning_lowbit.cli.lab.compare.power import Interval
from lightning_lowbit.report.blocks import Table
from lightning_lowbit.report.tables import as_markdown


def write_comparison(
    results: Results, baseline: str, output: Path, name: str | None = None, effects: Sequence[Effect] = ()
) -> str:
    """Writes a table and pictures into a folder; returns the table.

    ========== =======================================================================================
    table.md   a row for each row of the study, and a verdict on each expected effect
    loss.png   validation loss over steps
    gap.png    final validation loss minus that of the baseline, with 95 % intervals
    rates.png  loss over learning rate, of rows such as ``adamw@1e-3`` with three rates or more
    noise.png  measured ratio of gradient to quantization noise, above the gap to the baseline;
               as figure 5 of FP4 All the Way (arXiv 2505.19115)
    ========== =======================================================================================

    The files of a study with a name are ``<name>.md``, ``<name>_loss.png`` and so on.
    """
    table = markdown(results, baseline)
    if effects:
        table += "\n\n" + as_markdown(claims_table(effects, results))
    (output / f"{name or 'table'}.md").write_text(table + "\n")
    prefix = f"{name}_" if name else ""
    if any(results.values()):
        _picture_losses(results, output / f"{prefix}loss.png")
        _picture_gaps(results, baseline, output / f"{prefix}gap.png")
    curves = _curves(results)
    if any(len(curve) >= 3 for curve in curves.values()):
        _picture_rates(curves, output / f"{prefix}rates.png")
    if any(history(run, RATIO) for runs in results.values() for run in runs.values()):
        _picture_noise(results, baseline, output / f"{prefix}noise.png")
    return table


def markdown(results: Results, baseline: str) -> str:
    """The table as markdown; ``±`` is the standard deviation over seeds. Further validation metrics have columns.

    Gaps are paired by seed, with a 95 % interval of their mean (Student's t; ``df`` are its degrees of freedom).
    """
    names = dict.fromkeys(name for runs in results.values() for run in runs.values() for name in run.metrics)
    others = [name for name in names if name not in (LOSS, PERPLEXITY)]
    gap = [f"gap to {baseline}", "95 % interval"]
    header = ["run", "seeds", "loss", "perplexity", *others, *gap, "spikes", "tokens/s", "peak memory", "bits"]
    lines = []
    for row, runs in results.items():
        of_runs = list(runs.values())
        memory = collect(of_runs, lambda run: run.peak_memory_bytes)
        cells = [
            _spread(collect(of_runs, final_loss)),
            _spread(_last(of_runs, PERPLEXITY), 3),
            *(_spread(_last(of_runs, name)) for name in others),
            *(["baseline", ""] if row == baseline else gap_cells(differences(results, row, baseline))),
            _spread(collect(of_runs, lambda run: run.spikes), 1),
            _spread(collect(of_runs, lambda run: run.tokens_per_second), 0),
            f"{max(memory) / 2**30:.2f} GiB" if memory else "",
            _spread(collect(of_runs, lambda run: run.average_bits), 2),
        ]
        lines.append([row, str(len(runs)), *cells])
    return as_markdown(Table(header, lines))


def _last(runs: Sequence[Finished], name: str) -> list[float]:
    return collect(runs, lambda run: metric(run, name))


def _curves(results: Results) -> dict[str, dict[float, list[float]]]:
    """Losses of the seeds by a row's name without its learning rate, and by learning rate in ascending order."""
    curves: dict[str, dict[float, list[float]]] = {}
    for row, runs in results.items():
        match = re.fullmatch(r"(.+)(?:@|,lr=)((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", row, re.IGNORECASE)
        losses = collect(runs.values(), final_loss)
        if match and losses and 0 < float(match[2]) < inf:
            curves.setdefault(match[1], {}).setdefault(float(match[2]), []).extend(losses)
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _spread(values: Sequence[float], digits: int = 4) -> str:
    if not values:
        return ""
    center = f"{mean(values):,.{digits}f}"
    if len(values) == 1 or not all(map(isfinite, values)):
        return center
    return f"{center} ± {stdev(values):,.{digits}f}"


# Axes are cut, because one diverging row would flatten all others: losses at this multiple of the highest loss of the
# row that stays lowest, and gaps at this multiple of the median gap.
_HIGHEST_LOSS, _WIDEST_GAP = 1.5, 10.0


def _figure(height: float, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.subplots(rows, sharex=True)


def _style(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}


def _cut_losses(axes: Any, ranges: Sequence[tuple[float, float]]) -> str:
    """Cuts the axis, given the (lowest, highest) loss of each line; returns a remark for the label."""
    if not ranges:
        return ""
    bottom, top = (min(ends) for ends in zip(*ranges, strict=True))
    top += (_HIGHEST_LOSS - 1) * abs(top)
    if max(high for _, high in ranges) <= top:
        return ""
    axes.set_ylim(bottom - 0.05 * (top - bottom), top)
    return f"\nwhat is above {top:.3g} is cut off"


def _picture_losses(results: Results, path: Path) -> None:
    figure, axes = _figure(4.5)
    ranges = []
    for number, (row, runs) in enumerate(results.items()):
        by_step = group_by_step(history(run, LOSS) for run in runs.values())
        if not by_step:
            continue
        # Where one seed is not finite, the mean is not either, and the line ends.
        steps, points = list(by_step), [values if all(map(isfinite, values)) else [nan] for values in by_step.values()]
        means, low, high = ([f(values) for values in points] for f in (mean, min, max))
        label, style = row if isfinite(means[-1]) else f"{row} (diverged)", _style(number)
        axes.plot(steps, means, label=label, **style)
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.2, linewidth=0)
        if finite := [value for values in points for value in values if isfinite(value)]:
            ranges.append((min(finite), max(finite)))
    label = "validation loss (mean and range over seeds)" + _cut_losses(axes, ranges)
    if axes.lines:
        figure.legend(loc="outside right upper", frameon=False)
    axes.set(xlabel="optimizer step", ylabel=label)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _picture_gaps(results: Results, baseline: str, path: Path) -> None:
    gaps = {row: differences(results, row, baseline) for row in results if row != baseline}
    gaps = {row: values for row, values in gaps.items() if values}
    figure, axes = _figure(1.2 + 0.4 * len(gaps))
    names: list[str] = []
    ends: list[float] = []  # of the intervals
    for position, (row, values) in enumerate(gaps.items()):
        finite = list(filter(isfinite, values))
        diverged = len(finite) < len(values)
        if not diverged:
            color = _style(list(results).index(row))["color"]  # as in loss.png
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
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)


def _picture_rates(curves: Mapping[str, Mapping[float, Sequence[float]]], path: Path) -> None:
    figure, axes = _figure(4.5)
    rates = sorted({rate for curve in curves.values() for rate in curve})
    ranges = []
    top = 0.98  # height of the crosses, as a share of the axes
    for number, (name, curve) in enumerate(curves.items()):
        style = _style(number)
        means = [mean(losses) if all(map(isfinite, losses)) else nan for losses in curve.values()]  # a gap is a NaN
        axes.plot(list(curve), means, label=name, **style)
        dots = [(rate, loss) for rate, losses in curve.items() for loss in losses if isfinite(loss)]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=style["color"], markersize=4, alpha=0.6)
            ranges.append((min(loss for _, loss in dots), max(loss for _, loss in dots)))
        diverged = [rate for rate, value in zip(curve, means, strict=True) if not isfinite(value)]
        if diverged:
            crosses = [top] * len(diverged)
            axes.plot(diverged, crosses, "x", color=style["color"], transform=axes.get_xaxis_transform())
            top -= 0.04
            for last in [rate for rate in curve if rate < diverged[0]][-1:]:
                axes.axvline(last, color=style["color"], linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    label = "final validation loss (mean over seeds; dots: seeds)" + _cut_losses(axes, ranges)
    axes.set(xlabel="learning rate (×: a seed diverged; dotted: the last rate before)", ylabel=label)
    figure.legend(loc="outside right upper", frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _picture_noise(results: Results, baseline: str, path: Path) -> None:
    figure, (above, below) = _figure(6, rows=2)
    thresholds = set()
    for number, (row, runs) in enumerate(results.items()):
        style = _style(number)
        ratios = {seed: history(run, RATIO) for seed, run in runs.items()}
        baselines = results[baseline]
        gaps = {seed: _gap_history(run, baselines[seed]) for seed, run in runs.items() if seed in baselines}
        for axes, curves in ((above, ratios), (below, gaps if row != baseline else {})):
            finite = ([(step, value) for step, value in curve if isfinite(value)] for curve in curves.values())
            if by_step := group_by_step(finite):
                means, low, high = ([f(values) for values in by_step.values()] for f in (mean, min, max))
                axes.plot(list(by_step), means, label=row if axes is below else None, **style)
                axes.fill_between(list(by_step), low, high, color=style["color"], alpha=0.15, linewidth=0)
        for run in runs.values():
            thresholds.add(run.noise_threshold)
            for begin, *_ in run.phases[1:]:
                for axes in (above, below):
                    axes.axvline(begin, color=style["color"], linestyle=":", linewidth=1)
    for threshold in thresholds - {None}:
        above.axhline(threshold, color="black", linewidth=0.8)
        above.annotate(f"{threshold:.3g}", (1, threshold), xycoords=("axes fraction", "data"), va="center")
    below.axhline(0, color="black", linewidth=0.8)
    above.set_yscale("log")
    above.set(ylabel="gradient over quantization noise")
    below.set(xlabel="optimizer step (dotted: a change of phase)", ylabel=f"validation loss minus that of {baseline}")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)


def _gap_history(run: Finished, baseline: Finished) -> list[tuple[float, float]]:
    other = dict(history(baseline, LOSS))
    return [(step, value - other[step]) for step, value in history(run, LOSS) if step in other]
