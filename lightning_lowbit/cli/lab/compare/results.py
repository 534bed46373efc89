"""The table and the pictures of a study."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, stdev

from lightning_lowbit.cli.lab.compare.charts import study_charts
from lightning_lowbit.cli.lab.compare.claims import Effect, claims_table, gap_cells
from lightning_lowbit.cli.lab.compare.losses import (
    LOSS,
    PERPLEXITY,
    Finished,
    Results,
    collect,
    final_loss,
    gaps_to,
    metric,
)
from lightning_lowbit.report.blocks import Table
from lightning_lowbit.report.pictures import write_picture
from lightning_lowbit.report.tables import as_markdown


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
    gaps, lines = gaps_to(baseline, results), []
    for row, by_seed in results.items():
        runs = list(by_seed.values())
        memory = collect(runs, lambda run: run.peak_memory_bytes)
        cells = [
            _spread(collect(runs, final_loss)),
            _spread(_last_values(runs, PERPLEXITY), 3),
            *(_spread(_last_values(runs, name)) for name in others),
            *(["baseline", ""] if row == baseline else gap_cells(gaps.get(row, []))),
            _spread(collect(runs, lambda run: run.spikes), 1),
            _spread(collect(runs, lambda run: run.tokens_per_second), 0),
            f"{max(memory) / 2**30:.2f} GiB" if memory else "",
            _spread(collect(runs, lambda run: run.average_bits), 2),
        ]
        lines.append([row, str(len(runs)), *cells])
    return as_markdown(Table(header, lines))


def _last_values(runs: Sequence[Finished], name: str) -> list[float]:
    return collect(runs, lambda run: metric(run, name))


def _spread(values: Sequence[float], digits: int = 4) -> str:
    if not values:
        return ""
    center = f"{mean(values):,.{digits}f}"
    if len(values) == 1 or not all(map(isfinite, values)):
        return center
    return f"{center} ± {stdev(values):,.{digits}f}"
