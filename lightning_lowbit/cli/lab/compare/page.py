"""The page of a study: verdicts, curves of the rows over each other, intervals, and links to the pages of the runs."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import mean
from urllib.parse import quote

from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.cli.lab.compare.claims import NO_POWER, Effect, claims_table, gap_cells, verdict_on
from lightning_lowbit.cli.lab.compare.losses import Results, collect, final_loss, gaps_to, loss_curves
from lightning_lowbit.cli.lab.compare.power import Interval
from lightning_lowbit.report.blocks import Block, Chart, Link, Section, Table, Text
from lightning_lowbit.report.formatting import needs_log_axis
from lightning_lowbit.report.html import render

_ROWS = 7  # of a chart, beside the baseline; a chart has eight colors

_VERDICTS = Text(
    "shown: the 95 % interval excludes 0 in the expected direction. contradicted: it excludes 0 in the other one. "
    "not shown: it contains 0 and excludes the expected size. no power: it contains both, or there is no interval."
)


def write_page(
    path: Path,
    results: Results,
    baseline: str,
    effects: Sequence[Effect],
    power: Sequence[Block],
    command: str,
) -> None:
    """Writes the page of a study; runs link to their own pages where these exist. ``power`` may be empty."""
    sections = [Section("Claims", [claims_table(effects, results), _VERDICTS])] if effects else []
    sections.append(Section("Validation loss, mean over seeds", _curves(results, baseline) or [Text("No loss yet.")]))
    intervals = _intervals(results, baseline)
    sections.append(Section(f"Gap to {baseline}, same seed", intervals or [Text("No two rows share a seed yet.")]))
    sections += [Section("Power", power)] if power else []
    sections.append(Section("Runs", [_runs(results, path.parent)]))
    sections += [Section("Machine", [machine])] if (machine := _machine(results)).rows else []
    sections.append(Section("Command", [Text(command, preformatted=True)]))
    replace_file(path, render(path.stem, sections, facts=_facts(results, effects)))


def _facts(results: Results, effects: Sequence[Effect]) -> list[tuple[str, str, str]]:
    facts = [("Rows", str(len(results)), ""), ("Finished runs", str(sum(map(len, results.values()))), "")]
    verdicts = [verdict_on(effect, results) for effect in effects]
    kinds = sorted(set(verdicts), key=lambda kind: (kind == NO_POWER, kind))
    return facts + [(f"Claims: {kind}", str(verdicts.count(kind)), f"of {len(verdicts)}") for kind in kinds]


def _split_rows(rows: Sequence[str], baseline: str) -> list[list[str]]:
    others = [row for row in rows if row != baseline]
    first = [baseline] if baseline in rows else []
    return [[*first, *others[start : start + _ROWS]] for start in range(0, max(len(others), 1), _ROWS)]


def _curves(results: Results, baseline: str) -> list[Chart]:
    curves = {row: (list(steps), [*map(mean, steps.values())]) for row, steps in loss_curves(results).items()}
    charts = []
    for rows in _split_rows(list(curves), baseline) if curves else []:
        log = needs_log_axis(value for row in rows for value in curves[row][1])
        charts.append(Chart("", {row: curves[row] for row in rows}, y_label="loss", log=log))
    return charts


def _intervals(results: Results, baseline: str) -> list[Block]:
    gaps = gaps_to(baseline, results)
    numbers = {row: number for number, row in enumerate(gaps, 1)}
    finite = [row for row, values in gaps.items() if all(map(isfinite, values))]
    charts: list[Block] = []
    for rows in filter(None, _split_rows(finite, baseline)):
        ends = ([numbers[rows[0]] - 0.5, numbers[rows[-1]] + 0.5], [0.0, 0.0])
        series = {baseline: ends} | {f"{numbers[row]} {row}": _bar(numbers[row], gaps[row]) for row in rows}
        note = "vertical: 95 % intervals (Student's t over pairs); the last number of a row is its mean"
        charts.append(Chart("", series, y_label="difference of the loss", x_label="row", note=note))
    cells = [[str(numbers[row]), row, str(len(values)), *gap_cells(values)] for row, values in gaps.items()]
    return [*charts, Table(["", "row", "pairs", "gap", "95 % interval"], cells)] if gaps else []


def _bar(number: int, gaps: Sequence[float]) -> tuple[list[float], list[float]]:
    interval = Interval.of(gaps)
    ys = [interval.low, interval.high, interval.mean] if interval else [mean(gaps)]
    return [float(number)] * len(ys), ys


def _runs(results: Results, folder: Path) -> Table:
    rows = []
    for row, runs in results.items():
        for seed, run in sorted(runs.items()):
            name = f"{row}, seed {seed}"
            loss = next(iter(collect([run], final_loss)), "")
            has_page = run.report is not None and (folder / run.report).exists()
            rows.append([Link(name, quote(run.report or "")) if has_page else name, run.steps, loss])
    return Table(["run", "steps", "loss"], rows)


def _machine(results: Results) -> Table:
    values: dict[str, set[str]] = {}
    for run in (run for runs in results.values() for run in runs.values()):
        for name, value in run.machine.items():
            values.setdefault(name, set()).add(str(value))
    return Table((), [[name, ", ".join(sorted(texts))] for name, texts in values.items()])
