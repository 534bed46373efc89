"""The page of a study: verdicts, curves of the rows over each other, intervals, and links to the pages of the runs."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.cli.lab.compare.charts import parts, study_charts
from lightning_lowbit.cli.lab.compare.claims import NO_POWER, Effect, claims_table, gap_cells, verdict_on
from lightning_lowbit.cli.lab.compare.losses import Results, collect, final_loss, gaps_to
from lightning_lowbit.report.blocks import Block, Link, Section, Table, Text
from lightning_lowbit.report.html import render

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
    charts: dict[str, list[Block]] = {
        kind: [part for chart in whole for part in parts(chart, baseline)]
        for kind, whole in study_charts(results, baseline).items()
    }
    sections.append(Section("Validation loss, mean over seeds", charts["loss"] or [Text("No loss yet.")]))
    has_gaps = bool(gaps_to(baseline, results))
    gaps = [*charts["gap"], _gap_table(results, baseline)] if has_gaps else [Text("No two rows share a seed yet.")]
    sections.append(Section(f"Gap to {baseline}, same seed", gaps))
    others = {"rates": "Loss over learning rates", "noise": "Gradient over quantization noise"}
    sections += [Section(title, charts[kind]) for kind, title in others.items() if kind in charts]
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


def _gap_table(results: Results, baseline: str) -> Table:
    gaps = gaps_to(baseline, results)
    numbers = {row: number for number, row in enumerate((row for row in results if row != baseline), 1)}
    rows = [[numbers[row], row, len(values), *gap_cells(values)] for row, values in gaps.items()]
    return Table(["", "row", "pairs", "gap", "95 % interval"], rows)


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
