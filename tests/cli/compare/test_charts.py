"""The charts of a study: what their lines, bands, limits and rows are."""

from math import isnan
from pathlib import Path

import pytest

from lightning_lowbit.cli.lab.compare.charts import parts, study_charts
from lightning_lowbit.cli.lab.compare.claims import Interval
from lightning_lowbit.cli.lab.compare.losses import RATIO
from lightning_lowbit.cli.lab.compare.record import write_comparison
from tests.cli.compare.conftest import result, rows
from tests.tables import each

DIVERGED = {
    "bf16": {0: result(3.0, 2.0), 1: result(3.1, 2.1)},
    "good": {0: result(3.0, 2.02), 1: result(3.1, 2.13)},
    "also good": {0: result(3.0, 2.05)},
    "huge": {0: result(3.0, 1e6)},
    "half": {0: result(3.0, 2.5), 1: result(3.0, None)},
    "never": {0: result(None, None)},
}


def test_losses_and_gaps_of_rows_of_which_some_diverge():
    charts = study_charts(DIVERGED, "bf16")
    (losses,), (gaps,) = charts["loss"], charts["gap"]
    assert losses.series["bf16"] == ([100, 200], pytest.approx([3.05, 2.05])), "means over seeds"
    assert losses.bands["bf16"] == ([3.0, 2.0], [3.1, 2.1]) and "huge" not in losses.bands
    half = losses.series["half"][1]
    assert half[0] == 3 and isnan(half[1]), "a mean over those that are left would hide the one that diverged"
    assert losses.limits == (-float("inf"), pytest.approx(1.5 * 3.0)) and not losses.log
    assert gaps.limits == pytest.approx((-0.5, 0.5)), "ten times the median"
    assert "; ".join(gaps.rows) == "good   +0.025; also good   +0.05; huge   +1e+06; half   diverged; never   diverged"
    assert gaps.series["1 good"] == ([1.0] * 3, pytest.approx([0.02, 0.03, 0.025])), "seeds and their mean"
    assert gaps.series["4 half"] == ([], []), "a mean would hide the seed that diverged"
    interval = Interval.of([0.02, 0.03])
    assert gaps.bands == {"1 good": ([pytest.approx(interval.low)] * 3, [pytest.approx(interval.high)] * 3)}


def test_a_page_has_all_rows_in_charts_of_eight_colors():
    many = rows(**{f"row{number}": [2.0 + number / 100] for number in range(30)})
    (losses,) = study_charts(many, "row0")["loss"]
    pieces = [[*part.series] for part in parts(losses, "row0")]
    assert all(names[0] == "row0" and len(names) <= 8 for names in pieces)
    assert [name for names in pieces for name in names[1:]] == [*many][1:]


LITTLE = [["never"], ["never", "fine"], ["fine", "never"], ["fine", "alike"], ["none", "fine"], ["unknown"]]


@each("names", LITTLE, fast=2)
def test_pictures_of_little(names):
    known = rows(never=[None], fine=[2.0], alike=[2.0], none=[])
    known["unknown"] = {0: result(2.0, metrics={"loss": 1.0}, history={})}
    write_comparison({name: known[name] for name in names}, names[0], Path())
    assert Path("loss.png").exists() and Path("gap.png").exists()


def by_rate(name, losses, between="@"):
    """Rows of a name that end in a learning rate, one for each list of what the seeds ended with."""
    return rows(**{f"{name}{between}{rate}": ends for rate, ends in losses.items()})


@each("between", ["@", ",lr="])
def test_losses_over_learning_rates(between):
    adam = {"1e-2": [4.0], "5e-4": [2.5, 2.7], "0.001": [2.0, 2.4], "1e-4": [2.0, None]}
    results = {"bf16": {0: result(2.0)}, **by_rate("a+b", adam, between), **by_rate("c", {".001": [2.1]}, between)}
    (rates,) = study_charts(results, "bf16")["rates"]
    assert rates.x_log and [*rates.series] == ["a+b", "c"], "a row without a learning rate has no curve"
    xs, ys = rates.series["a+b"]
    assert xs == [1e-4, 5e-4, 1e-3, 1e-2], "rates are not in their order"
    assert isnan(ys[0]) and ys[1:] == pytest.approx([2.6, 2.2, 4.0]), "not the mean over the seeds"
    assert rates.bands["a+b"][0][1:] == [2.5, 2.0, 4.0]


@each(
    "results",
    [
        {"bf16": {0: result(2.0)}},
        by_rate("a", {"1e-3": [2.0], "5e-3": [2.0]}) | by_rate("b", {"1e-2": [2.0], "5e-3": [2.0]}),
        {**by_rate("a", {"1e-3": [2.0], "5e-3": [2.0]}), "a@1e-2": {}},
        by_rate("a", {rate: [2.0] for rate in ("1e-3", "5e-3", "0", "1e999", "1.2.3", "fast")}),
        by_rate("", {"1e-3": [2.0], "5e-3": [2.0], "1e-2": [2.0]}),
    ],
)
def test_there_is_no_curve_of_two_rates(results):
    assert set(study_charts(results, next(iter(results)))) == {"loss", "gap"}


def test_the_ratio_of_gradient_to_noise_is_drawn_where_it_was_measured():
    def measured(gap, ratios, phases):
        losses = [[10, 3.0 + gap], [20, 2.0 + gap]]
        summary = {"gradient_noise": {"threshold": 1.7}} if ratios else {}
        return result(2.0 + gap, history={"val_loss": losses, RATIO: ratios}, summary=summary, phases=phases)

    base = {seed: measured(0.0, [], [[0, 20, "fqt"]]) for seed in (0, 1)}
    assert set(study_charts({"bf16": base}, "bf16")) == {"loss", "gap"}
    noisy = {
        0: measured(0.1, [[5, 4.0], [15, 2.0]], [[0, 15, "fqt"], [15, 20, "qaf"]]),
        1: measured(0.3, [[5, 6.0], [15, None]], [[0, 20, "fqt"]]),
    }
    ratios, gaps = study_charts({"bf16": base, "noisy": noisy}, "bf16")["noise"]
    assert ratios.series["noisy"] == ([5, 15], [5.0, 2.0]), "means over seeds, of what is finite"
    assert ratios.series["threshold 1.7"] == ([5, 15], [1.7] * 2) and ratios.log
    assert ratios.note == "phases change at step 15 (noisy)"
    assert gaps.series["noisy"] == ([10, 20], pytest.approx([0.2, 0.2]))
