"""What ``lowbit compare`` concludes: intervals, verdicts, power, and the page of a study."""

import re
from math import log, nan
from pathlib import Path

import pytest

from lightning_lowbit.cli.lab.compare.claims import Interval, claims_table, read_effects, t_quantile, verdict
from lightning_lowbit.cli.lab.compare.losses import differences
from lightning_lowbit.cli.lab.compare.power import (
    Spread,
    pairs_for,
    pilot_seeds,
    power,
    power_blocks,
    resolved_by,
    spread_of,
)
from lightning_lowbit.cli.lab.compare.record import write_comparison, write_page
from lightning_lowbit.cli.lab.compare.study import read_study
from lightning_lowbit.report.tables import as_markdown
from tests.cli.compare.conftest import result, rows
from tests.recipes.recipe_names import STUDIES


def test_the_interval_is_of_the_mean_of_pairs():
    known = {1: 12.706205, 2: 4.302653, 3: 3.182446, 9: 2.262157, 30: 2.042272, 120: 1.979930}  # of Student's t
    assert {df: round(t_quantile(0.975, df), 6) for df in known} == known
    assert round(t_quantile(0.95, 7), 6) == 1.894579
    interval = Interval.of([0.01, 0.02, 0.03])
    half = 4.302653 * 0.01 / 3**0.5
    assert (interval.mean, interval.df) == (0.02, 2)
    assert (interval.low, interval.high) == (pytest.approx(0.02 - half), pytest.approx(0.02 + half))
    assert [Interval.of(few) for few in ([], [0.1], [0.1, nan])] == [None] * 3


def test_power_is_that_of_the_paired_t_test():
    assert power(1.0, 1.0, 10) == pytest.approx(0.8031, abs=1e-4)  # tables of the noncentral t distribution
    assert power(0.5, 1.0, 34) == pytest.approx(0.8078, abs=1e-4)
    assert power(0.0, 1.0, 3) == pytest.approx(0.025, abs=1e-6), "half of 5 %, in one direction"
    assert power(1.0, 1.0, 1) == 0
    assert [pairs_for(effect, 1.0) for effect in (0.2, 0.5, 0.8, 1.0, 0.01)] == [199, 34, 15, 10, None]
    assert power(resolved_by(3, 0.02), 0.02, 3) == pytest.approx(0.8) and resolved_by(1, 0.02) is None


def test_the_spread_is_pooled_and_says_how_rough_it_is():
    spread = Spread.pooled([[0.0, 0.2], [0.0, 0.1, 0.2], [5.0], [0.0, nan]])
    assert spread == Spread(pytest.approx(((0.02 + 0.02) / 3) ** 0.5), 3)
    assert Spread(1.0, 1).bounds() == pytest.approx((0.4461, 31.91), rel=1e-3)  # roots of 1 / χ² at 97.5 and 2.5 %
    assert Spread(1.0, 10).bounds() == pytest.approx((0.6987, 1.7549), rel=1e-3)
    assert Spread.pooled([[0.1], []]) is None


def test_the_four_verdicts():
    for found, sign, size, said in (
        ([0.019, 0.02, 0.021], 1, 0.02, "shown"),
        ([0.004, 0.005, 0.006], 1, 0.02, "shown"),  # smaller, but there
        ([-0.021, -0.02, -0.019], -1, None, "shown"),
        ([-0.021, -0.02, -0.019], 1, 0.02, "contradicted"),
        ([0.019, 0.02, 0.021], -1, None, "contradicted"),
        ([-0.001, 0.0, 0.001], 1, 0.02, "not shown"),
        ([0.0, 0.0, 0.0], -1, None, "not shown"),  # equal to the bit
        ([-0.03, 0.0, 0.03], 1, 0.02, "no power"),
        ([-0.03, 0.0, 0.03], -1, None, "no power"),
        ([0.02], 1, 0.02, "no power"),
        ([], 1, 0.02, "no power"),
        ([0.02, nan], 1, 0.02, "no power"),
    ):
        assert verdict(Interval.of(found), sign, size) == said, (found, sign, size)


RESULTS = rows(bf16=[2.0, 2.1, 1.9], fp4=[2.02, 2.12, 1.93], fp3=[2.1, 2.15, None])
GIVEN = {
    "fp4": {"expected": "+1%", "source": "a | b"},
    "fp3": [{"expected": "higher"}, {"against": "fp4", "expected": -0.01}],
}


def effects(given=GIVEN):
    return read_effects(given, ["bf16", "fp4", "fp3"], "bf16", "mine.yaml")


def test_claims_are_tabulated_with_their_verdicts():
    text = write_comparison(RESULTS, "bf16", Path(), "mine", effects())
    assert Path("mine.md").read_text() == text + "\n"
    _, _, fp4, fp3, other = text.partition("\n\n")[2].splitlines()
    assert fp4 == r"| fp4 against bf16 | +1% (+0.0200) | +0.0233 | +0.0090 to +0.0377 (df 2) | shown | a \| b |"
    assert fp3 == "| fp3 against bf16 | higher | +nan |  | no power |  |"
    assert other.startswith("| fp3 against fp4 | -0.01 |")
    assert as_markdown(claims_table(effects(), {})).count("no power") == 3, "without runs"
    assert differences(RESULTS, "fp4", "none") == []


def test_a_share_is_of_the_other_rows_loss_or_of_all():
    (share,) = effects({"fp4": {"expected": "-10%"}})
    assert (share.sign, share.size, share.expected) == (-1, 0.1, "-10%")
    assert share.amount(rows(bf16=[2.0, 4.0], fp4=[9.0])) == pytest.approx(0.3)
    assert share.amount(rows(bf16=[], fp4=[5.0])) == pytest.approx(0.5), "no run of the other row"
    assert share.amount(rows(bf16=[], fp4=[])) is None


def test_power_needs_two_pairs_and_an_effect():
    seeds = dict.fromkeys(RESULTS, [0, 1, 2])
    assert power_blocks([], seeds, RESULTS, "bf16", needed=False) == []
    assert power_blocks(effects(), seeds, rows(bf16=[2.0], fp4=[2.1], fp3=[]), "bf16", needed=False) == []
    table, *_ = power_blocks(effects(), seeds, RESULTS, "bf16", needed=False)
    assert table.header[-1] == "resolved with 80 % power"
    assert [row[2] for row in table.rows] == ["3"] * 3
    assert table.rows[0][3] == "84 %" and table.rows[1][3] == "", "a sign has no size"


def test_a_pilot_says_seeds_time_and_tokens():
    known = rows(bf16=[2.0, 2.0], fp4=[2.0, 2.04], fp3=[])
    given = effects({"fp4": {"expected": 0.02}, "fp3": {"expected": -0.5}})
    spread = spread_of(given, known, "bf16")
    assert (spread.value, spread.df) == (pytest.approx(0.0283, abs=1e-4), 1)
    table, *notes = power_blocks(given, dict.fromkeys(known, [0, 1, 2]), known, "bf16", needed=True)
    fp4, fp3 = (row[5:] for row in table.rows)
    times = (resolved_by(3, spread.value) / 0.02) ** 2
    assert fp4 == ["18 (6 to 1,000+)", "36 min 0 s", f"× {times:.1f}", f"{int(200 * times) + 1:,}"]
    assert fp3[1:3] == ["4 min 0 s", "enough"], "a row without runs takes as long as the others"
    text = " ".join(note.text for note in notes)
    assert "1 degree of freedom" in text and "roughly" in text and "1/√tokens" in text


def test_a_pilot_takes_two_seeds_of_an_effect_with_a_size():
    seeds = {"bf16": [0, 1, 2], "fp4": [3, 2, 1], "fp3": [0]}
    assert pilot_seeds(effects(), seeds, "mine") == {"bf16": [1, 2], "fp4": [1, 2]}
    for given, name, line in (
        (effects(), None, "give one with --study"),
        ([], "mine", "study 'mine' has none"),
        (effects({"fp3": {"expected": "lower"}}), "mine", "--seeds 0,1"),
    ):
        with pytest.raises(ValueError, match=line):
            pilot_seeds(given, seeds, name)


def test_the_page_shows_curves_intervals_verdicts_and_links():
    report = Path("a+b@1e-3/seed_0/report.html")
    report.parent.mkdir(parents=True)
    report.touch()
    linked = {0: result(3.0, 2.0, report=str(report)), 1: result(3.0, 2.1, report="gone/report.html")}
    many = rows(**{f"row{number}": [2.0, 2.1 + number / 100] for number in range(9)}) | {"a+b@1e-3": linked}
    given = read_effects({"row1": {"expected": "higher", "source": "<b>"}}, list(many), "row0", "mine.yaml")
    write_page(Path("mine.html"), many, "row0", given, [], "lowbit compare '<x>'")
    page = Path("mine.html").read_text()
    assert "&lt;b&gt;" in page and "&lt;x&gt;" in page and "no power" in page
    assert 'href="a%2Bb%401e-3/seed_0/report.html">a+b@1e-3, seed 0</a>' in page
    assert "a+b@1e-3, seed 1" in page and "gone" not in page, "a link that leads nowhere"
    assert page.count("<svg") == 4, "two charts of curves and two of intervals"
    assert all(f"{number} row{number} <b>" in page for number in range(1, 9)), "each interval has its legend"


@pytest.mark.slow
def test_expected_shares_are_those_of_the_numbers_that_a_source_gives():
    """Of perplexities as a change of the loss, whose exponential they are."""
    checked = []
    for effect in (effect for name in STUDIES for effect in read_study(name).effects):
        assert effect.source, effect
        if effect.is_share:
            found = re.search(r": (?:test )?(perplexity|loss) ([\d.]+) against ([\d.]+)$", effect.source)
            kind, of, to = found[1], float(found[2]), float(found[3])
            share = log(of) / log(to) - 1 if kind == "perplexity" else of / to - 1
            assert effect.sign * effect.size == pytest.approx(share, abs=2e-3 if share > 1 else 6e-4), effect
            checked.append(kind)
    assert {*checked} == {"perplexity", "loss"}


def test_the_study_of_the_guide_is_one():
    guide = Path(__file__).parents[3] / "docs" / "guides" / "comparing.md"
    (block,) = re.findall(r"```yaml\n(.*?)```", guide.read_text(), re.DOTALL)
    Path("guide.yaml").write_text(block)
    study = read_study("guide.yaml")
    expected = {effect.name: effect.expected for effect in study.effects}
    assert expected == {"adamw against bf16": "+0.02", "nearest against adamw": "higher"}
