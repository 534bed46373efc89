"""Outliers on two processes."""

import pytest

from tests.callbacks.monitors.outliers.ranks import EVERY, RANKS, STEPS, train
from tests.callbacks.monitors.outliers.runs import assert_same
from tests.launch import launch


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch("tests.callbacks.monitors.outliers.ranks", RANKS, tmp_path_factory.mktemp("outliers"))


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "tp", "fsdp1"])
def test_two_processes_log_what_one_does(results, how):
    first, second = (result[how] for result in results)
    assert sorted(first["curves"]) == list(range(EVERY, STEPS + 1, EVERY))
    assert first["curves"] == second["curves"], "ranks log different values"
    assert first["state"] == second["state"]
    alone = train("auto", "", 8 if how == "tp" else 9, 1)["curves"]
    if how == "fsdp1":  # flattened weights
        alone = {step: {n: v for n, v in row.items() if not n.endswith("/mlp")} for step, row in alone.items()}
    if how == "tp":  # of the input of the down projection each rank has half of the channels, and their rms
        for row in (*first["curves"].values(), *alone.values()):
            assert row.pop("outliers/mlp.down_proj") > 0
    assert_same(first["curves"], alone)
    assert first["curves"][2]["outliers/mlp.up_proj"] == 2 / (32 * 16), "a planted outlier is missed"


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "tp", "fsdp1"])
def test_two_collectives_in_a_logged_step(results, how):
    for rank, result in enumerate(results):
        wanted = [2 * int(step % EVERY == 0) for step in range(1, STEPS + 1)]
        assert result[how]["collectives"] == wanted, f"rank {rank}"


def test_flattened_weights_are_said_where_they_are_asked_for(results):
    (said,) = results[0]["said"]
    assert "swiglu=True needs the rows of weights, which FSDPOnCPU flattens and shards" in said
    assert results[1]["said"] == []
