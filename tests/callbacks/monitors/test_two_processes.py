"""Gradient norms and outliers on two processes."""

import pytest

from tests.callbacks.monitors.ranks import EVERY, RANKS, RUNS, STEPS, hidden_of, train
from tests.curves import assert_curves
from tests.launch import launch
from tests.pairwise import selected

LOGGED = list(range(EVERY, STEPS + 1, EVERY))
FAST = pytest.mark.fast(*(str(RUNS[number]) for number in (0, 4, 6, 7)))  # one of each strategy


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    runs = map(str, selected(request, "run"))
    return launch("tests.callbacks.monitors.ranks", RANKS, tmp_path_factory.mktemp("watched"), *runs)


@FAST
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_two_processes_log_what_one_does(results, run):
    first, second = (result[run] for result in results)
    assert sorted(first["norms"]) == sorted(first["outliers"]) == LOGGED
    for name in ("norms", "outliers", "state"):
        assert first[name] == second[name], f"ranks have different {name}"
    alone = train(*run, devices=1, hidden=hidden_of(run))
    assert_curves(first["norms"], alone["norms"], rtol=1e-6)
    assert {name for name in first["norms"][2] if "body" in name} >= {f"grad_norm/unclipped/body.{i}" for i in range(3)}
    if run[2]:
        assert first["norms"][2]["grad_norm/clipped"] < first["norms"][2]["grad_norm/unclipped"] / 2, "it does not clip"
    assert ("grad_norm/used" in first["norms"][2]) == (run[1] == "stable_spam")
    outliers = alone["outliers"]
    if run[0] == "fsdp1":  # flattened weights
        outliers = {step: {n: v for n, v in row.items() if not n.endswith("/mlp")} for step, row in outliers.items()}
    if run[0] == "tp":  # of the input of the down projection each rank has half of the channels, and their rms
        for row in (*first["outliers"].values(), *outliers.values()):
            row.pop("outliers/mlp.down_proj")
    assert_curves(first["outliers"], outliers, rtol=1e-5, atol=1e-7)
    assert first["outliers"][2]["outliers/mlp.up_proj"] == 2 / (32 * 16), "a planted outlier is missed"


@FAST
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_collectives_in_logged_steps_alone(results, run):
    """One of norms where gradients are spread, two of inputs; no layer needs some of its own."""
    for rank, result in enumerate(results):
        for monitor, count in (("norm", int(run[0] != "ddp")), ("outliers", 2)):
            wanted = [count * int(step in LOGGED) for step in range(1, STEPS + 1)]
            assert result[run]["collectives"][monitor] == wanted, f"rank {rank}, {monitor}"


def test_flattened_weights_are_said_where_they_are_asked_for(results):
    (said,) = results[0]["said"]
    assert "swiglu=True needs the rows of weights, which FSDPOnCPU flattens and shards" in said
    assert results[1]["said"] == []
