"""The record of a study is a small file from which table, pictures and page are drawn again, without the runs.

    {"version": 1, "study": name, "baseline": row, "command": text, "pilot": false,
     "seeds": {row: [0, 1, 2]}, "effects": {row: [{"against": row, "expected": "-3.4%", "source": text}]},
     "runs": {row: {seed: fields of Finished}}}

The first drawing also uses a record, so a later drawing from its file equals it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.checks import choose, from_fields, is_number
from lightning_lowbit.cli.lab.compare.claims import Effect, read_effects
from lightning_lowbit.cli.lab.compare.losses import Finished, Results
from lightning_lowbit.cli.lab.compare.power import power_blocks
from lightning_lowbit.cli.lab.compare.results import write_comparison, write_page
from lightning_lowbit.report.blocks import Table, Text
from lightning_lowbit.report.tables import as_markdown

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
    numbers = [run.steps, run.seconds, run.spikes, *(step for step, _ in points), *(begin for begin, *_ in run.phases)]
    others = [run.tokens_per_second, run.peak_memory_bytes, run.average_bits, run.noise_threshold]
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
