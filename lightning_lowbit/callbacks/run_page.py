"""The page of a run: which metric is drawn where, from what ``run.json`` holds."""

import math
import re
import statistics
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_lowbit.callbacks.report_page import Chart, Section, Table, Text, number, render

MOST_CHARTS = 60


def render_run(
    run: Mapping[str, Any], contributed: Iterable[Section], exception: BaseException | None, configuration: str
) -> str:
    """The page of what ``run.json`` holds, with the sections of other callbacks."""
    sections = [*_metric_sections(run), *contributed]
    if run["status"] == "failed":
        trace = "".join(traceback.format_exception(exception)).strip()
        sections.insert(0, Section("What went wrong", [Text(trace, preformatted=True)]))
    sections += [
        Section("Environment", [Table((), list(run["environment"].items()))]),
        Section("Configuration", [Text(configuration, preformatted=True)]),
    ]
    lead = run["error"].splitlines()[0] if run["status"] == "failed" else f"Started {run['environment']['started']}"
    return render(run["name"], sections, status=run["status"], lead=lead, facts=_facts(run))


def _find(names: Iterable[str], pattern: str) -> str | None:
    """The metric that a name's pattern means: the shortest, before those of parts or layers."""
    return min((name for name in names if re.search(pattern, name.lower())), key=len, default=None)


def _training(run: Mapping[str, Any]) -> list[str]:
    return [name for name in run["history"] if name not in run["validation_metrics"]]


def _facts(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    most = f"of {number(run['max_steps'])}" if run["max_steps"] else ""
    facts = [("Optimizer steps", number(run["steps"]), most), ("Duration", _duration(run["seconds"]), "")]
    wanted = [("Validation loss", run["validation_metrics"], "loss"), ("Training loss", _training(run), "loss")]
    wanted.append(("Validation perplexity", run["validation_metrics"], "perplexity|ppl"))
    for label, names, pattern in wanted:
        if name := _find(names, pattern):
            remark = ""
            if name in run["best"]:
                steps = [step for step, value in run["history"][name] if value == run["best"][name]]
                remark = f"best {number(run['best'][name])}" + (f" at step {number(steps[0])}" if steps else "")
            facts.append((label, number(run["metrics"][name]), remark))
    if name := _find(_training(run), "/s$"):
        values = [value for _, value in run["history"][name] if math.isfinite(value)]
        facts.append(("Throughput", number(statistics.median(values)) if values else "none", f"{name}, median"))
    if run["peak_memory_bytes"]:
        facts.append(("Peak memory", f"{run['peak_memory_bytes'] / 2**30:.2f} GiB", "of the first process"))
    return [*facts, ("Precision", run["precision"]["plugin"], run["precision"]["casts"])]


def _metric_sections(run: Mapping[str, Any]) -> list[Section]:
    training, history = _training(run), run["history"]
    rates = [name for name in training if name.startswith("lr-") and not name.endswith(("-momentum", "-weight_decay"))]
    losses = [_find(training, "loss"), _find(run["validation_metrics"], "loss")]
    norm, throughput = _find(training, "grad.*norm"), _find(training, "/s$")

    def chart(title: str, names: Iterable[str | None], log: bool | None = None) -> Chart:
        series = {name.removeprefix(f"{title}/"): tuple(zip(*history[name], strict=True)) for name in names if name}
        values = [y for _, ys in series.values() for y in ys if math.isfinite(y)]
        if log is None:  # where a linear axis would show nothing but the largest values
            log = bool(values) and min(values) > 0 and max(values) > 20 * min(values)
        return Chart(title, series, log=log, spans=run["phases"])  # type: ignore[arg-type]

    kinds = zip(("training", "validation"), losses, strict=True)
    missing = [f"No {kind} loss was logged." for kind, name in kinds if not name]
    sections = [Section("Loss", [*([chart("", losses)] if any(losses) else []), *map(Text, missing)])]
    drawn = [chart(norm, [norm])] if norm else []
    title = "learning rate" if len(rates) > 1 else "".join(rates)
    drawn += [chart(title, rates, log=False)] if rates else []
    drawn += [chart(throughput, [throughput])] if throughput else []
    missing = [] if norm else ["No gradient norm was logged."]
    missing += [] if throughput else ["No throughput was logged (a metric whose name ends in /s)."]
    sections.append(Section("Optimisation", [*drawn, *map(Text, missing)]))

    groups: dict[str, list[str]] = {}
    for name in sorted(set(history) - {*losses, *rates, norm, throughput}):
        parts = name.split("/")  # quantity/operand/layer: all layers in one chart
        groups.setdefault("/".join(parts[:2]), []).append(name)
    charts: list[Chart | Text] = [chart(title, names) for title, names in list(groups.items())[:MOST_CHARTS]]
    if rest := list(groups)[MOST_CHARTS:]:
        charts.append(Text(f"{len(rest)} more are in run.json: {', '.join(rest)}."))
    return [*sections, Section("Other metrics", charts)] if charts else sections


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
