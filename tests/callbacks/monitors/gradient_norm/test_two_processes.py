"""Gradient norms on two processes."""

import pytest

from tests.callbacks.monitors.gradient_norm.ranks import EVERY, RANKS, RUNS, STEPS, UNPLUGGED, train
from tests.callbacks.monitors.gradient_norm.runs import assert_same
from tests.launch import launch

Run = tuple[str, str, bool]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch("tests.callbacks.monitors.gradient_norm.ranks", RANKS, tmp_path_factory.mktemp("watched"))


@pytest.fixture(scope="module")
def alone():
    """What one process logs."""
    return {run[1:]: train("auto", *run[1:], devices=1)["curves"] for run in [*RUNS, UNPLUGGED]}


@pytest.mark.parametrize("run", [*RUNS, UNPLUGGED], ids=str)
def test_two_processes_log_what_one_does(results, alone, run):
    first, second = (result[run]["curves"] for result in results)
    assert sorted(first) == list(range(EVERY, STEPS + 1, EVERY))
    assert first == second, "ranks log different values"
    assert_same(first, alone[run[1:]])
    assert {name for name in first[2] if "body" in name} >= {f"grad_norm/unclipped/body.{i}" for i in range(3)}
    if run[2]:
        assert first[2]["grad_norm/clipped"] < first[2]["grad_norm/unclipped"] / 2, "the run does not clip"
    assert ("grad_norm/used" in first[2]) == (run[1] == "stable_spam")


@pytest.mark.parametrize("run", [*RUNS, UNPLUGGED], ids=str)
def test_one_collective_in_a_logged_step_where_gradients_are_spread(results, run):
    for rank, result in enumerate(results):
        counts = result[run]["collectives"]
        wanted = [int(run[0] != "ddp" and step % EVERY == 0) for step in range(1, STEPS + 1)]
        assert counts == wanted, f"rank {rank}; three layers need none of their own"
