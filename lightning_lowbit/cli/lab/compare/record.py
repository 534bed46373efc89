"""The record of a study is a small file from which table, pictures and page are drawn again, without the runs.

    {"version": 1, "study": name, "baseline": row, "command": text, "pilot": false,
     "seeds": {row: [0, 1, 2]}, "effects": {row: [{"against": row, "expected": "-3.4%", "source": text}]},
     "runs": {row: {seed: fields of Finished}}}

The first drawing also uses a record, so a later drawing from its file equals it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from urllib.parse import quote

from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.checks import choose, from_fields, is_number, some
from lightning_lowbit.cli.lab.compare.charts import parts, study_charts
from lightning_lowbit.cli.lab.compare.claims import NO_POWER, Effect, claims_table, gap_cells, read_effects, verdict_on
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
from lightning_lowbit.cli.lab.compare.power import power_blocks
from lightning_lowbit.report.blocks import Block, Link, Section, Table, Text
from lightning_lowbit.report.html import render
from lightning_lowbit.report.pictures import write_picture
from lightning_lowbit.report.tables import as_markdown

_VERDICTS = Text(
    "shown: the 95 % interval excludes 0 in the expected direction. contradicted: it excludes 0 in the other one. "
    "not shown: it contains 0 and excludes the expected size. no power: it contains both, or there is no interval."
)
_VERSION = 1
_KEYS = ("version", "study", "baseline", "command", "pilot", "seeds", "effects", "runs")


@dataclass(frozen=True)
class Record:
    """A study with its finished runs; ``seeds`` are the planned ones, by row."""

    name: str | None
    baseline: str
    command: str
    is_pilot: bool
    seeds: Mapping[str, Sequence[int]]
    effects: Sequence[Effect]
    results: Results

    def _power(self) -> list[Table | Text]:
        return power_blocks(self.effects, self.seeds, self.results, self.baseline, needed=self.is_pilot)

    def power_text(self) -> str:
        blocks = self._power()
        texts = [as_markdown(block) + "\n" if isinstance(block, Table) else block.text for block in blocks]
        return "\n".join(["", *texts, ""]) if blocks else ""

    def write(self, output: Path) -> str:
        """Writes table, pictures, page and the record itself into a folder; returns the table."""
        stem = self.name or "study"
        page = output / f"{stem}.html"
        write_page(page, self.results, self.baseline, self.effects, self._power(), self.command)
        replace_file(output / f"{stem}.json", self.as_json())
        return write_comparison(self.results, self.baseline, output, self.name, self.effects)

    def as_json(self) -> str:
        effects: dict[str, list[dict[str, Any]]] = {}
        for effect in self.effects:
            entry = {"against": effect.against, "expected": effect.written, "source": effect.source}
            effects.setdefault(effect.row, []).append(entry)
        runs = {row: {seed: _fields(run) for seed, run in by_seed.items()} for row, by_seed in self.results.items()}
        seeds = {row: [*numbers] for row, numbers in self.seeds.items()}
        values = (_VERSION, self.name, self.baseline, self.command, self.is_pilot, seeds, effects, runs)
        return _text(dict(zip(_KEYS, values, strict=True))) + "\n"


def read_record(path: Path) -> Record:
    """Reads the file of :meth:`Record.write`; a damaged file is a ``ValueError``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # also bytes that are no text
        content = None
    if not isinstance(content, dict) or not {"version", "baseline", "runs"} <= content.keys():
        raise ValueError(f"--from {path}: no record of a study, which `lowbit compare` writes as <study>.json.")
    if content["version"] != _VERSION:
        raise ValueError(
            f"--from {path}: a record of version {content['version']!r}, and this lightning_lowbit reads {_VERSION}. "
            "Install the version that wrote it."
        )
    try:
        return _record(content, str(path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"--from {path} is damaged: {error}") from error


def _record(content: Mapping[str, Any], path: str) -> Record:
    for key in content:
        choose(f"entry of {path}", key, _KEYS)
    rows = [*content["runs"]]
    name, baseline = content["study"], choose("baseline", content["baseline"], rows)
    if name is not None and name != Path(name).name:
        raise ValueError(f"study is the name of a file; got {name!r}.")
    results = {row: {int(seed): _finished(run, row) for seed, run in content["runs"][row].items()} for row in rows}
    seeds = {row: [int(seed) for seed in content["seeds"][row]] for row in rows}
    effects = read_effects(content["effects"], rows, baseline, path)
    return Record(name, baseline, str(content["command"]), content["pilot"] is True, seeds, effects, results)


def _finished(content: Mapping[str, Any], row: str) -> Finished:
    run = from_fields(Finished, f"a run of row {row!r}", content)
    points = [point for curve in run.history.values() for point in curve]
    numbers = [run.steps, run.seconds, *(step for step, _ in points), *(begin for begin, *_ in run.phases)]
    others = [run.spikes, run.tokens_per_second, run.peak_memory_bytes, run.average_bits, run.noise_threshold]
    others += [*run.metrics.values(), *(value for _, value in points)]
    texts = [run.report or "", *run.machine]
    known = [*numbers, *(value for value in others if value is not None)]
    if not all(map(is_number, known)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a run of row {row!r} has text where a number should be, or the reverse.")
    return run


def _fields(run: Finished) -> dict[str, Any]:
    values = {field.name: getattr(run, field.name) for field in fields(run)}
    required = ("steps", "seconds", "metrics", "history", "spikes")
    return {name: value for name, value in values.items() if name in required or value not in (None, [], (), {})}


def _text(value: Any, depth: int = 0) -> str:
    """Writes JSON with a line for each entry, row and run."""
    if not isinstance(value, Mapping) or not value or depth > 2:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    space = " " * (depth + 1)
    lines = ",\n".join(f"{space}{json.dumps(str(key))}: {_text(item, depth + 1)}" for key, item in value.items())
    return "{\n" + lines + "\n" + " " * depth + "}"


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
    if lacking := _without_loss(results):
        table += f"\n\n{lacking}"
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


def _without_loss(results: Results) -> str:
    """Returns a sentence about rows whose finished runs logged no loss; empty if there are none."""
    rows = [row for row, runs in results.items() if runs and not collect(runs.values(), final_loss)]
    if not rows:
        return ""
    return (
        f"No {LOSS} was logged in {some(rows)}: log it in validation_step, and let the runs validate "
        "(--trainer.val_check_interval) before they end."
    )


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
    sections.append(
        Section("Validation loss, mean over seeds", charts["loss"] or [Text(_without_loss(results) or "No loss yet.")])
    )
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
