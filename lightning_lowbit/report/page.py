"""Arranges the metrics of ``run.json`` on the page of a run."""

import math
import re
import statistics
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_lowbit.report.blocks import Block, Chart, Section, Table, Text
from lightning_lowbit.report.formatting import duration, needs_log_axis, number
from lightning_lowbit.report.html import render

MOST_CHARTS = 60
_LOSS = "loss(?!_scale)"
_NORMS = [f"grad_norm/{stage}" for stage in ("unclipped", "clipped", "used")]  # of a GradientNormMonitor


def render_run(
    run: Mapping[str, Any], contributed: Iterable[Section], exception: BaseException | None, configuration: str
) -> str:
    metrics = _metric_sections(run)
    details = [section for section in metrics if section.is_folded]  # may be many
    sections = [*(section for section in metrics if not section.is_folded), *contributed, *details]
    if run["alerts"]:
        sections.insert(0, Section("Alerts", [Text(text) for text in run["alerts"]], is_alarming=True))
    if run["status"] == "failed":
        trace = "".join(traceback.format_exception(exception)).strip()
        sections.insert(0, Section("What went wrong", [Text(trace, preformatted=True)]))
    sections.append(Section("Environment", [Table((), list(run["environment"].items()))]))
    sections.append(Section("Configuration", [Text(configuration, preformatted=True)]))
    lead = run["error"].splitlines()[0] if run["status"] == "failed" else f"Started {run['environment']['started']}"
    return render(run["name"], sections, status=run["status"], lead=lead, facts=_facts(run))


def _find(names: Iterable[str], pattern: str) -> str | None:
    """Finds the metric with the shortest name that matches a pattern: the whole comes before its parts or layers."""
    return min((name for name in names if re.search(pattern, name.lower())), key=len, default=None)


def _training(run: Mapping[str, Any]) -> list[str]:
    others = {*run["validation_metrics"], *run.get("quantities", {})}
    return [name for name in run["history"] if name not in others]


def _facts(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    most = f"of {number(run['max_steps'])}" if run["max_steps"] else ""
    facts = [("Optimizer steps", number(run["steps"]), most), ("Duration", duration(run["seconds"]), "")]
    wanted = [("Validation loss", run["validation_metrics"], _LOSS), ("Training loss", _training(run), _LOSS)]
    wanted.append(("Validation perplexity", run["validation_metrics"], "perplexity|ppl"))
    for label, names, pattern in wanted:
        if name := _find(names, pattern):
            facts.append((label, number(run["metrics"][name]), _when(run, name)))
    if name := _find(_training(run), "/s$"):
        values = [value for _, value in run["history"][name] if math.isfinite(value)]
        facts.append(("Throughput", number(statistics.median(values)) if values else "none", f"{name}, median"))
    if run["peak_memory_bytes"]:
        facts.append(("Peak memory", f"{run['peak_memory_bytes'] / 2**30:.2f} GiB", "of the first process"))
    if run["coverage"] is not None:
        facts.append(("Coverage", f"{run['coverage']:.1%}", "of FLOPs have two quantized operands"))
    return [*facts, ("Precision", run["precision"]["plugin"], run["precision"]["casts"])]


def _when(run: Mapping[str, Any], name: str) -> str:
    last, best = run["history"][name][-1], run["best"].get(name)
    text = f"at step {number(last[0])}"
    if best is None:
        return text
    steps = [step for step, value in run["history"][name] if value == best]  # none if thinning dropped it
    where = f" at step {number(steps[0])}" if steps else ""
    return f"{text}, the best" if last[1] == best else f"{text}; best {number(best)}{where}"


def _metric_sections(run: Mapping[str, Any]) -> list[Section]:
    training = _training(run)
    rates = [name for name in training if name.startswith("lr-") and not name.endswith(("-momentum", "-weight_decay"))]
    losses = [_find(training, _LOSS), _find(run["validation_metrics"], _LOSS)]
    norm, throughput = _find(training, "grad.*norm"), _find(training, "/s$")
    norms = [name for name in ("grad_norm", *_NORMS) if name in training] or ([norm] if norm else [])

    kinds = zip(("training", "validation"), losses, strict=True)
    missing = [f"No {kind} loss was logged." for kind, name in kinds if not name]
    sections = [Section("Loss", [*([_chart(run, "", losses)] if any(losses) else []), *map(Text, missing)])]
    drawn = [_chart(run, "grad_norm" if len(norms) > 1 else norms[0], norms)] if norms else []
    title = "learning rate" if len(rates) > 1 else "".join(rates)
    drawn += [_chart(run, title, rates, log=False)] if rates else []
    drawn += [_throughput_chart(run, throughput)] if throughput else []
    missing = [] if norm else ["No gradient norm was logged."]
    missing += [] if throughput else ["No throughput was logged: add Throughput(), or log a metric ending in /s."]
    sections.append(Section("Optimization", [*drawn, *map(Text, missing)]))
    seen = {*losses, *rates, *norms, throughput}
    return [*sections, *_other_sections(run, [name for name in run["history"] if name not in seen])]


def _other_sections(run: Mapping[str, Any], names: Sequence[str]) -> list[Section]:
    history, quantities = run["history"], run.get("quantities", {})
    is_of_layer = {name: name in quantities or name.count("/") > 1 for name in names}
    constant = [name for name in names if not is_of_layer[name] and len({y for _, y in history[name]}) == 1]
    groups: dict[str, list[str]] = {}
    # In the order of logging, but numbers of layers come last, because there may be many.
    for name in sorted(names, key=lambda name: (name in quantities, name.split("/")[0])):
        if name not in constant:
            groups.setdefault(quantities.get(name, "/".join(name.split("/")[:2])), []).append(name)
    others: list[Block] = []
    layers: dict[str, list[Block]] = {}  # by quantity
    for title, members in list(groups.items())[:MOST_CHARTS]:
        blocks = layers.setdefault(title.split("/")[0], []) if any(is_of_layer[name] for name in members) else others
        blocks.append(_chart(run, title, members))
    if constant:
        rows = [[name, history[name][0][1], _constant_at([step for step, _ in history[name]])] for name in constant]
        others.append(Table(["metric without a chart", "value", "at steps"], rows))
    if left := list(groups)[MOST_CHARTS:]:
        others.append(Text(f"{len(left)} more are in run.json: {', '.join(left)}."))
    few = [block for blocks in layers.values() if len(blocks) < 3 for block in blocks]
    sections = [Section("Other metrics", others), Section("Metrics of layers", few, is_folded=True)]
    sections += [
        Section(f"{quantity} of layers", blocks, is_folded=True)
        for quantity, blocks in layers.items()
        if len(blocks) >= 3
    ]
    return [section for section in sections if section.blocks]


def _chart(run: Mapping[str, Any], title: str, names: Iterable[str | None], log: bool | None = None) -> Chart:
    curves = {name: run["history"][name] for name in names if name}
    series = {name.removeprefix(f"{title}/"): tuple(zip(*points, strict=True)) for name, points in curves.items()}
    log = needs_log_axis(y for _, ys in series.values() for y in ys) if log is None else log
    return Chart(title, series, log=log, spans=run["phases"])  # type: ignore[arg-type]


def _constant_at(steps: Sequence[int]) -> str:
    return number(steps[0]) if len(steps) == 1 else f"{number(steps[0])}–{number(steps[-1])}, all the same"


def _throughput_chart(run: Mapping[str, Any], name: str) -> Chart:
    """Leaves out the first points while compilation keeps them below half the median, and notes it."""
    points = run["history"][name]
    usual = statistics.median([y for _, y in points if math.isfinite(y)] or [0.0])
    slow = next((i for i, (_, y) in enumerate(points) if not y < usual / 2), 0)
    chart = _chart({**run, "history": {name: points[slow:]}}, name, [name], log=False)
    if not slow:
        return chart
    values = ", ".join(f"{number(y)} at step {number(step)}" for step, y in points[: min(slow, 3)])
    return replace(chart, note=f"Not drawn, since a run begins with compiling: {values}{', …' if slow > 3 else ''}.")
