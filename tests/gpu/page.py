"""The page of the documentation: ``python -m tests.gpu.page [RESULTS] > docs/results/gpu.md``.

RESULTS are the lines of a run, ``results.jsonl``. Those of the run that the page shows are kept in
``docs/results/gpu.jsonl``, which is the default; without any the page says that there has been no run. What stands
around them is in ``page.md``, and what was special in that run in ``runs.md``.
"""

import sys
from pathlib import Path

from tests.gpu.records import records_of, tables_of
from tests.gpu.table import PARTS

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE, RUN = RESULTS / "gpu.md", RESULTS / "gpu.jsonl"
COUNTED = ("environment", "compile", "kernels", "agreement", "native", "training", "casts")  # values are in the lines
RUNS = Path(__file__).with_name("runs.md")  # in words: when and how the page's run was made
NOT_RUN = "**Not run**: no machine with a GPU has run this command yet, and nothing here is measured."


def page(results):
    """The text of the page."""
    records, template = records_of(results), Path(__file__).with_name("page.md").read_text()
    if not records:
        return template.replace("{state}", NOT_RUN).replace("{runs}\n\n", "")
    tables = tables_of(records, list(PARTS), counted=COUNTED).replace("\n## ", "\n### ")  # one level lower
    runs = RUNS.read_text() if Path(results) == RUN else ""
    template = template.replace("{state}", state(records)).replace("{runs}\n\n", f"{runs}\n" if runs else "")
    return f"{template}\n## Results\n\n{tables}"


def state(records):
    """Where the run was, and how many checks are right."""
    values = {}
    for record in records:
        values |= record["value"] if isinstance(record["value"], dict) else {}
    right, wrong = (sum(record["ok"] is ok for record in records) for ok in (True, False))
    versions = f"Python {values.get('Python')}, torch {values.get('torch')}, Triton {values.get('triton')}"
    return f"Run on {values.get('name', 'a machine without a GPU')}, {versions}: {right} checks right, {wrong} wrong."


if __name__ == "__main__":
    sys.stdout.write(page(*(sys.argv[1:2] or [RUN])))
