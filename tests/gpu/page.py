"""The page of the documentation: ``python -m tests.gpu.page [RESULTS] > docs/results/gpu.md``.

RESULTS are the lines of a run, ``results.jsonl``. Those of the run that the page shows are kept in
``docs/results/gpu.jsonl``, which is the default; without any the page says that there has been no run. What stands
around the tables is in ``page.md``, and what was special in that run in ``runs.md``. The tables have what a reader
chooses by; all values are in the lines.
"""

import sys
from pathlib import Path

from tests.gpu.records import counts_of, line, records_of, table
from tests.gpu.table import PARTS

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE, RUN = RESULTS / "gpu.md", RESULTS / "gpu.jsonl"
RUNS = Path(__file__).with_name("runs.md")  # in words: when and how the page's run was made
NOT_RUN = "**Not run**: no machine with a GPU has run this command yet, and nothing here is measured."
WIDTHS = (2048, 4096, 8192)  # at 1024 nn.Linear itself varies twofold
# What a reader chooses among first; the lines have all presets.
LAYERS = ("nvfp4", "nvfp4-nvidia", "mxfp4", "mxfp8", "fp8-delayed", "fp8-current", "fp8-row", "fp8-blockwise")
LAYERS += ("int8", "int4", "ternary")


def page(results):
    """The text of the page."""
    records, template = records_of(results), Path(__file__).with_name("page.md").read_text()
    if not records:
        return template.partition("{runs}")[0].format(state=NOT_RUN)
    return template.format(
        state=state(records),
        runs=RUNS.read_text() if Path(results) == RUN else "",
        parts=parts(records),
        skipped=skipped(records),
        wrong="\n".join(line(record) for record in records if record["ok"] is False) or "- nothing",
        layers=layers(values(records, "layers")),
        experts=experts(values(records, "layers")),
        steps=steps(values(records, "steps") | values(records, "compiled")),
        optimizers=optimizers(values(records, "steps")),
    )


def state(records):
    """Where the run was, and how many checks are right."""
    facts = {key: fact for checks in values(records, "environment").values() for key, fact in checks.items()}
    right, wrong = (sum(record["ok"] is ok for record in records) for ok in (True, False))
    versions = f"Python {facts.get('Python')}, torch {facts.get('torch')}, Triton {facts.get('triton')}"
    return f"Run on {facts.get('name', 'a machine without a GPU')}, {versions}: {right} checks right, {wrong} wrong."


def values(records, part):
    """The values of the checks of a part, by their names."""
    return {record["name"]: record["value"] for record in records if record["part"] == part and record["value"]}


def parts(records):
    """What is right, and how much of it was."""
    counts = {name: [count or "" for count in counts_of(records, name)[:4]] for name in PARTS}
    rows = [[name, PARTS[name].right, *count] for name, count in counts.items() if any(count)]
    return table(["part", "what is right, or measured", "right", "wrong", "skipped", "measured"], rows)


def skipped(records):
    """The checks that were not made, by name but for those that had no time left."""
    undone = [record for record in records if record["ok"] is None and record["value"] is None]
    names = [f"`{record['name']}`" for record in undone if not record["why"].startswith("skipped: time")]
    late = f"For {len(undone) - len(names)} checks no time was left." if len(undone) > len(names) else ""
    return " ".join(filter(None, [f"Skipped, for reasons in the lines: {', '.join(names)}." if names else "", late]))


def layers(checks):
    """Speeds beside ``nn.Linear``, one launch after the other and in a CUDA graph, and the largest memory."""
    rows = []
    for name in LAYERS:
        runs = [checks.get(f"{width}: {name}", {}) for width in WIDTHS]
        speeds = [run.get(key) for key in ("its speed by nn.Linear", "speed by nn.Linear") for run in runs]
        if any(speeds):
            memory = _text(checks.get(f"4096: {name}", {}).get("peak by nn.Linear"), 1)
            rows.append([f"`{name}`", *(_text(speed, 2) for speed in speeds), memory])
    widths = [*map(str, WIDTHS), *(f"{width}, graph" for width in WIDTHS)]
    return table(["", *widths, "memory, 4096"], rows)


def experts(checks):
    """Times of a stack of experts: a row for its casts, a column for each way."""
    times = {name.partition(": ")[2]: check.get("both passes, ms") for name, check in checks.items()}
    ways = ["one by one", "grouped"]
    names = dict.fromkeys(name.partition(", ")[0] for name in times if name.endswith(tuple(ways)))
    rows = [[f"`{name}`", *(_text(times.get(f"{name}, {way}"), 1) for way in ways)] for name in names]
    return table(["", *ways], [["bf16", "", _text(times.get("F.grouped_mm"), 1)], *rows])


def steps(checks):
    """A row for each preset, a column for each model and way."""
    cells = {tuple(reversed(name.split(": "))): check["ms"] for name, check in checks.items() if "tokens/s" in check}
    presets, ways = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True)) if cells else ([], [])
    rows = [[f"`{preset}`", *(_text(cells.get((preset, way)), 1) for way in ways)] for preset in presets]
    return table(["", *ways], rows)


def optimizers(checks):
    checks = {name.removeprefix("optimizer: "): check for name, check in checks.items() if "launches" in check}
    rows = [
        [name, _text(check["ms"], 1), check["launches"], _text(check["state bytes per weight"], 2)]
        for name, check in checks.items()
        if "tokens/s" not in check
    ]
    return table(["", "ms", "launches", "bytes of state per parameter"], rows)


def _text(number, places):
    return f"{number:.{places}f}" if isinstance(number, float) else number or ""


if __name__ == "__main__":
    sys.stdout.write(page(*(sys.argv[1:2] or [RUN])))
