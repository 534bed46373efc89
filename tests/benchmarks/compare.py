"""Compares two runs of a benchmark, which wrote their numbers with ``--json``.

    python -m tests.benchmarks.compare OLD.json NEW.json

Only runs on one machine, close in time, can be compared.
"""

import json
import sys
from pathlib import Path


def main(old: str, new: str) -> None:
    runs = [json.loads(Path(path).read_text()) for path in (old, new)]
    for name, run in zip(("old", "new"), runs, strict=True):
        print(f"{name}: {run['where']}")
    print("\n| | old | new | new / old |\n|---|---|---|---|")
    before, after = (run["numbers"] for run in runs)
    for name in [*before, *(name for name in after if name not in before)]:
        pair = before.get(name), after.get(name)
        shown = ["" if number is None else f"{number:.4g}" for number in pair]
        print(f"| {name} | {' | '.join(shown)} | {'' if None in pair else f'{pair[1] / pair[0]:.2f}×'} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
