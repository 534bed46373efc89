"""Gradient noise on two processes: by draws, and by layers, of their part of the tokens."""

import pytest

from tests.callbacks.monitors.gradient_noise.ranks import ASKED, RANKS, RUNS, STEPS, train
from tests.callbacks.monitors.gradient_noise.runs import assert_equal
from tests.launch import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("run", [*RUNS, *((name,) for name in ASKED)], ids=lambda run: ", ".join(map(str, run))),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch("tests.callbacks.monitors.gradient_noise.ranks", RANKS, tmp_path_factory.mktemp("noisy"))


def test_ranks_measure_the_same_and_change_nothing(run, results):
    (first, alone), (second, other_alone) = ((result[*run, True], result[*run, False]) for result in results)
    assert [step for step, _ in first["measurements"]] == list(range(1, STEPS + 1))
    assert first["measurements"] == second["measurements"]
    assert first["layers"] == second["layers"]
    assert len(first["layers"]) == 4
    assert [ratio < 1e3 for _, ratio in first["measurements"]] == ["nearest" not in run] * STEPS
    for rank, (measured, without) in enumerate(((first, alone), (second, other_alone))):
        assert without["measurements"] == []
        for name in {"weights", "random"} & measured.keys():
            assert_equal([*measured[name]], [*without[name]], f"rank {rank}, {name}")


def test_whatever_the_strategy(run, results):
    """One that draws only a weight, with one process, too; sums over tokens are rounded in another order there."""
    if len(run) == 1:
        same = results[0]["ddp", True]
    elif run[1] == "weight":
        same = train("", *run[1:])
    else:
        same = results[0][*next(one for one in RUNS if one[1:] == run[1:]), True]
    found = results[0][*run, True]
    assert dict(found["measurements"]) == pytest.approx(dict(same["measurements"]), rel=1e-4)
    assert found["layers"] == pytest.approx(same["layers"], rel=1e-4)
