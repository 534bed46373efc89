"""The page of the documentation: ``python -m tests.gpu.page [RESULTS] > docs/results/gpu.md``.

RESULTS are the lines of a run, ``results.jsonl``. Those of the run that the page shows are kept in
``docs/results/gpu.jsonl``, which is the default; without any the page says that there has been no run. What stands
around them is in ``page.md``.
"""

import sys
from pathlib import Path

from tests.gpu.records import records_of, tables_of
from tests.gpu.table import PARTS

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE, RUN = RESULTS / "gpu.md", RESULTS / "gpu.jsonl"
NOT_RUN = "**Not run**: no machine with a GPU has run this command yet, and nothing here is measured."


def page(results):
    """The text of the page."""
    records, template = records_of(results), Path(__file__).with_name("page.md").read_text()
    if not records:
        return template.replace("{state}", NOT_RUN)
    tables = tables_of(records, list(PARTS)).replace("\n## ", "\n### ")  # one level lower
    return f"{template.replace('{state}', state(records))}\n## Results\n\n{tables}"


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
