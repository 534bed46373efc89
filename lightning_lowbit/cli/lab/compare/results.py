"""The table, the pictures and the page of a study: verdicts, curves, intervals, and links to the pages of the runs."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from urllib.parse import quote

from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.cli.lab.compare.charts import parts, study_charts
from lightning_lowbit.cli.lab.compare.claims import NO_POWER, Effect, claims_table, gap_cells, verdict_on
from lightning_lowbit.cli.lab.compare.losses import (
    LOSS,
    PERPLEXITY,
    Finished,
    Results,
    collect,
    differences,
    final_loss,
    metric,
)
from lightning_lowbit.report.blocks import Block, Link, Section, Table, Text
from lightning_lowbit.report.html import render
from lightning_lowbit.report.pictures import write_picture
from lightning_lowbit.report.tables import as_markdown

_VERDICTS = Text(
    "shown: the 95 % interval excludes 0 in the expected direction. contradicted: it excludes 0 in the other one. "
    "not shown: it contains 0 and excludes the expected size. no power: it contains both, or there is no interval."
)


def write_comparison(
    results: Results, baseline: str, output: Path, name: str | None = None, effects: Sequence[Effect] = ()
) -> str:
    """Writes a table and pictures into a folder; returns the table.

    ``table.md`` has the rows and the verdicts; ``loss.png``, ``gap.png``, ``rates.png`` and ``noise.png`` are the
    charts of :func:`study_charts`. The files of a study with a name are ``<name>.md``, ``<name>_loss.png`` and so on.
    """
    table = markdown(results, baseline)
    if effects:
        table += "\n\n" + as_markdown(claims_table(effects, results))
    (output / f"{name or 'table'}.md").write_text(table + "\n")
    prefix = f"{name}_" if name else ""
    for kind, charts in study_charts(results, baseline).items() if any(results.values()) else ():
        write_picture(output / f"{prefix}{kind}.png", *charts)
    return table


def markdown(results: Results, baseline: str) -> str:
    """Returns the table as markdown, with a column for each metric of the validation.

    ``±`` is the standard deviation over seeds. Gaps are paired by seed, with the 95 % interval of their mean.
    """
    names = dict.fromkeys(name for runs in results.values() for run in runs.values() for name in run.metrics)
    others = [name for name in names if name not in (LOSS, PERPLEXITY)]
    gap = [f"gap to {baseline}", "95 % interval"]
    header = ["run", "seeds", "loss", "perplexity", *others, *gap, "spikes", "tokens/s", "peak memory", "bits"]
    lines = []
    for row, by_seed in results.items():
        runs = list(by_seed.values())
        memory = collect(runs, lambda run: run.peak_memory_bytes)
        cells = [
            _spread(runs, final_loss),
            _spread(runs, partial(metric, name=PERPLEXITY), 3),
            *(_spread(runs, partial(metric, name=name)) for name in others),
            *(["baseline", ""] if row == baseline else gap_cells(differences(results, row, baseline))),
            _spread(runs, lambda run: run.spikes, 1),
            _spread(runs, lambda run: run.tokens_per_second, 0),
            f"{max(memory) / 2**30:.2f} GiB" if memory else "",
            _spread(runs, lambda run: run.average_bits, 2),
        ]
        lines.append([row, str(len(runs)), *cells])
    return as_markdown(Table(header, lines))


def _spread(runs: Sequence[Finished], get: Callable[[Finished], float | None], digits: int = 4) -> str:
    if not (values := collect(runs, get)):
        return ""
    center = f"{mean(values):,.{digits}f}"
    if len(values) == 1 or not all(map(isfinite, values)):
        return center
    return f"{center} ± {stdev(values):,.{digits}f}"


def write_page(
    path: Path, results: Results, baseline: str, effects: Sequence[Effect], power: Sequence[Block], command: str
) -> None:
    """Writes the page of a study; runs link to their own pages where these exist. ``power`` may be empty."""
    sections = [Section("Claims", [claims_table(effects, results), _VERDICTS])] if effects else []
    charts: dict[str, list[Block]] = {
        kind: [part for chart in whole for part in parts(chart, baseline)]
        for kind, whole in study_charts(results, baseline).items()
    }
    sections.append(Section("Validation loss, mean over seeds", charts["loss"] or [Text("No loss yet.")]))
    gaps = _gap_table(results, baseline)
    blocks = [*charts["gap"], gaps] if gaps.rows else [Text("No two rows share a seed yet.")]
    sections.append(Section(f"Gap to {baseline}, same seed", blocks))
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
    gaps = {row: differences(results, row, baseline) for row in results if row != baseline}
    rows = [[i, row, len(gap), *gap_cells(gap)] for i, (row, gap) in enumerate(gaps.items(), 1) if gap]
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
