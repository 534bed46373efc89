"""The tables of claims: each interval and each verdict is what `lowbit compare` computes from the numbers beside it."""

import re
from math import sqrt
from pathlib import Path

import pytest

from lightning_lowbit.cli.lab.compare.claims import Interval, t_quantile, verdict
from lightning_lowbit.cli.lab.compare.losses import differences
from lightning_lowbit.cli.lab.compare.record import read_record

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = {page.stem: page for page in sorted((RESULTS / "papers").glob("*.md")) if page.stem != "index"}
KNOWN = "".join(re.sub(r"\s+", " ", page.read_text()) for page in RESULTS.glob("*.md"))
VERDICTS = {"shown", "contradicted", "not shown", "no power", "not tried"}


def rows(page):
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if row[0] != "claim"]


def interval_of(told):
    """From mean and deviation of three pairs, from the pairs, or from a record."""
    if found := re.match(r"([-+][\d.]+) ± (at most )?([\d.]+):", told):
        center, half = float(found[1]), t_quantile(0.975, 2) * float(found[3]) / sqrt(3)
        assert found[2] or f"{found[1][1:]} ± {found[3]}" in KNOWN, f"no page of the results says {found[0]}"
        return Interval(center, center - half, center + half, 2)
    if found := re.search(r"\(\.\./studies/([\w.]+)\): `(\S+)` against `(\S+)`", told):
        record = read_record(RESULTS / "studies" / found[1])
        return Interval.of(differences(record.results, found[2], found[3]))
    return Interval.of([float(each) for each in told.partition(":")[0].split(", ")])


def expected_verdict(interval, expected):
    if expected == "0":
        return "contradicted" if interval.low > 0 or interval.high < 0 else "no power"
    if size := re.search(r"\(([-+][\d.]+)\)", expected):
        return verdict(interval, 1 if float(size[1]) > 0 else -1, abs(float(size[1])))
    return verdict(interval, {"higher": 1, "lower": -1}[expected])


@pytest.mark.parametrize("name", PAGES)
def test_intervals_and_verdicts_are_those_of_their_numbers(name):
    for claim, _, expected, told, last in rows(PAGES[name]):
        said, _, remark = last.partition(": ")
        assert said in VERDICTS, (claim, said)
        if not told:
            assert said != "not tried" or remark, f"{claim}: why was it not tried?"
            continue
        interval = interval_of(told)
        assert f": {interval.low:+.3f} to {interval.high:+.3f}" in told, (claim, told, interval)
        assert said == expected_verdict(interval, expected), (claim, interval)
