"""The charts of a study: losses, gaps to the baseline, losses over learning rates, and noise of gradients."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, nan
from statistics import mean, median

from lightning_lowbit.cli.lab.compare.claims import Interval
from lightning_lowbit.cli.lab.compare.losses import (
    LOSS,
    RATIO,
    Results,
    Steps,
    collect,
    differences,
    final_loss,
    gap_histories,
    group_by_step,
    history,
)
from lightning_lowbit.report.blocks import Chart, Series
from lightning_lowbit.report.formatting import needs_log_axis

# One diverging row would flatten all others: axes end at this multiple of the highest loss of the row that stays
# lowest, and at this multiple of the median gap.
_HIGHEST_LOSS, _WIDEST_GAP = 1.5, 10.0

_FEWEST_RATES = 3  # that make a curve


def study_charts(results: Results, baseline: str) -> dict[str, list[Chart]]:
    """Returns the charts by the name of their picture: ``loss``, ``gap``, ``rates`` and ``noise``.

    Rows such as ``adamw@1e-3`` with three rates or more make ``rates``, the loss over the learning rate. Measured
    ratios of gradient to noise make ``noise``, as figure 5 of FP4 All the Way (arXiv 2505.19115).
    """
    charts = {"loss": [_losses(results)], "gap": [_gaps(results, baseline)]}
    curves = _rate_curves(results)
    if any(len(curve) >= _FEWEST_RATES for curve in curves.values()):
        charts["rates"] = [_rates(curves)]
    if any(history(run, RATIO) for runs in results.values() for run in runs.values()):
        charts["noise"] = [_ratios(results), _gap_curves(results, baseline)]
    return charts


def parts(chart: Chart, first: str, most: int = 7) -> list[Chart]:
    """Splits a chart into several of eight colors, each with the series ``first``; none if it has no point."""
    names = [name for name in chart.series if name != first]
    groups = [names[start : start + most] for start in range(0, max(len(names), 1), most)]
    groups = [[*([first] if first in chart.series else []), *group] for group in groups]
    charts = [replace(chart, series={name: chart.series[name] for name in group}) for group in groups]
    return [part for part in charts if any(xs for xs, _ in part.series.values())]


def _lines(curves: Mapping[str, Steps]) -> tuple[Series, Series]:
    """Returns means over seeds by row, and ranges; NaN where a seed is not finite, so that the line ends there."""
    means, ranges = {}, {}
    for row, steps in curves.items():
        samples = [values if all(map(isfinite, values)) else [nan] for values in steps.values()]
        means[row] = [*steps], [*map(mean, samples)]
        if any(len(values) > 1 for values in samples):
            ranges[row] = [*map(min, samples)], [*map(max, samples)]
    return means, ranges


def _loss_limits(lines: Series) -> tuple[float, float]:
    tops = [max(finite) for _, losses in lines.values() if (finite := [*filter(isfinite, losses)])]
    lowest = min(tops, default=inf)
    return -inf, lowest + (_HIGHEST_LOSS - 1) * abs(lowest)


def _losses(results: Results) -> Chart:
    by_row = {row: [history(run, LOSS) for run in runs.values()] for row, runs in results.items()}
    lines, bands = _lines({row: group_by_step(curves) for row, curves in by_row.items()})
    limits = _loss_limits(lines)
    log = needs_log_axis(loss for _, losses in lines.values() for loss in losses if loss <= limits[1])
    label = "validation loss (mean and range over seeds)"
    return Chart("", lines, label, "optimizer step", log, bands=bands, limits=limits)


def _gaps(results: Results, baseline: str) -> Chart:
    """Draws a row for each number: dots are seeds, and bars are 95 % intervals."""
    gaps = {row: differences(results, row, baseline) for row in results if row != baseline}
    lines: dict[str, tuple[list[float], list[float]]] = {baseline: ([0.5, len(gaps) + 0.5], [0.0, 0.0])}
    bands, names = {}, []
    for number, (row, values) in enumerate(gaps.items(), 1):
        diverged = not all(map(isfinite, values))
        ys = [*values, mean(values)] if values and not diverged else []
        name = f"{number} {row}"
        lines[name] = [float(number)] * len(ys), ys
        if interval := Interval.of(values):
            bands[name] = [interval.low] * len(ys), [interval.high] * len(ys)
        names.append(f"{row}   {'diverged' if diverged else f'{mean(values):+.3g}' if values else ''}")
    sizes = [abs(value) for values in gaps.values() for value in values if isfinite(value)]
    limit = _WIDEST_GAP * median(sizes) if any(sizes) else inf
    note = "dots: seeds, and their mean; bars: 95 % intervals (Student's t over pairs)"
    label = f"final validation loss minus that of {baseline}, same seed"
    return Chart("", lines, label, "row", note=note, bands=bands, limits=(-limit, limit), rows=names)


def _rate_curves(results: Results) -> dict[str, Steps]:
    """Groups the losses of the seeds by a row's name without its learning rate, then by ascending rate."""
    curves: dict[str, Steps] = {}
    for row, runs in results.items():
        match = re.fullmatch(r"(.+)(?:@|,lr=)((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", row, re.IGNORECASE)
        losses = collect(runs.values(), final_loss)
        if match and losses and 0 < float(match[2]) < inf:
            curves.setdefault(match[1], {}).setdefault(float(match[2]), []).extend(losses)
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _rates(curves: Mapping[str, Steps]) -> Chart:
    lines, bands = _lines(curves)
    label = "final validation loss (mean and range over seeds)"
    return Chart("", lines, label, "learning rate", bands=bands, limits=_loss_limits(lines), x_log=True)


def _ratios(results: Results) -> Chart:
    runs = [run for by_seed in results.values() for run in by_seed.values()]
    ratios = {row: _finite([history(run, RATIO) for run in by_seed.values()]) for row, by_seed in results.items()}
    lines, bands = _lines(ratios)
    steps = [step for xs, _ in lines.values() for step in xs]
    thresholds = {run.noise_threshold for run in runs if run.noise_threshold is not None}
    ends = {f"threshold {value:.3g}": ([min(steps), max(steps)], [value] * 2) for value in thresholds if steps}
    begins: dict[int, dict[str, None]] = {}
    for row, by_seed in results.items():
        for begin in (phase[0] for run in by_seed.values() for phase in run.phases[1:]):
            begins.setdefault(begin, {})[row] = None
    note = "; ".join(f"phases change at step {begin} ({', '.join(rows)})" for begin, rows in sorted(begins.items()))
    label = "gradient over quantization noise"
    return Chart("", {**lines, **ends}, label, "optimizer step", log=True, bands=bands, note=note)


def _gap_curves(results: Results, baseline: str) -> Chart:
    gaps = {row: gap_histories(results, row, baseline) if row != baseline else [] for row in results}
    lines, bands = _lines({row: _finite(curves) for row, curves in gaps.items()})
    return Chart("", lines, f"validation loss minus that of {baseline}", "optimizer step", bands=bands)


def _finite(curves: Sequence[Sequence[tuple[float, float]]]) -> Steps:
    return group_by_step([(step, value) for step, value in curve if isfinite(value)] for curve in curves)
