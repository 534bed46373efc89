"""The page of a study: verdicts, curves of the rows over each other, intervals, and links to the pages of the runs."""

from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path
from statistics import mean
from urllib.parse import quote

from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.cli.lab.compare.claims import NO_POWER, Effect, claims_table, gap_cells, verdict_on
from lightning_lowbit.cli.lab.compare.losses import (
    LOSS,
    Results,
    collect,
    differences,
    final_loss,
    group_by_step,
    history,
)
from lightning_lowbit.cli.lab.compare.power import Interval
from lightning_lowbit.report.blocks import Block, Chart, Link, Section, Table, Text
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
    """Writes the page of a study; ``power`` is a section that may be empty. Runs have links to pages that are there."""
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
    said = [verdict_on(effect, results) for effect in effects]
    counts = {each: said.count(each) for each in sorted(set(said), key=lambda each: (each == NO_POWER, each))}
    return facts + [(f"Claims: {each}", str(count), f"of {len(said)}") for each, count in counts.items()]


def _charts(rows: Sequence[str], baseline: str) -> list[list[str]]:
    """The rows of each chart; the baseline is in all of them."""
    others = [row for row in rows if row != baseline]
    first = [baseline] if baseline in rows else []
    return [[*first, *others[start : start + _ROWS]] for start in range(0, max(len(others), 1), _ROWS)]


def _curves(results: Results, baseline: str) -> list[Chart]:
    curves = {}
    for row, runs in results.items():
        losses = group_by_step(history(run, LOSS) for run in runs.values())
        if losses:
            means = [mean(each) if all(map(isfinite, each)) else nan for each in losses.values()]
            curves[row] = (list(losses), means)
    charts = []
    for rows in _charts(list(curves), baseline) if curves else []:
        finite = [value for row in rows for value in curves[row][1] if isfinite(value)]
        log = bool(finite) and max(finite) > 20 * min(finite) > 0  # a linear axis would show only the largest values
        charts.append(Chart("", {row: curves[row] for row in rows}, y_label="loss", log=log))
    return charts


def _intervals(results: Results, baseline: str) -> list[Block]:
    found = {row: differences(results, row, baseline) for row in results if row != baseline}
    found = {row: gaps for row, gaps in found.items() if gaps}
    numbers = {row: number for number, row in enumerate(found, 1)}
    charts: list[Block] = []
    for rows in _charts([row for row, gaps in found.items() if all(map(isfinite, gaps))], baseline) if found else []:
        if rows:
            ends = ([numbers[rows[0]] - 0.5, numbers[rows[-1]] + 0.5], [0.0, 0.0])
            series = {baseline: ends} | {f"{numbers[row]} {row}": _bar(numbers[row], found[row]) for row in rows}
            note = "vertical: 95 % intervals (Student's t over pairs); the last number of a row is its mean"
            charts.append(Chart("", series, y_label="difference of the loss", x_label="row", note=note))
    table = [[str(numbers[row]), row, str(len(gaps)), *gap_cells(gaps)] for row, gaps in found.items()]
    return [*charts, Table(["", "row", "pairs", "gap", "95 % interval"], table)] if found else []


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
            is_there = run.report is not None and (folder / run.report).exists()
            rows.append([Link(name, quote(run.report or "")) if is_there else name, run.steps, loss])
    return Table(["run", "steps", "loss"], rows)


def _machine(results: Results) -> Table:
    """Where and when the runs ran, and with which versions; several values where they differ."""
    found: dict[str, dict[str, None]] = {}
    for run in (run for runs in results.values() for run in runs.values()):
        for name, value in run.machine.items():
            found.setdefault(name, {})[str(value)] = None
    return Table((), [[name, ", ".join(sorted(values))] for name, values in found.items()])
