"""Both ranks go back though one alone saw the bad batch; states of an earlier version."""

import pytest

from tests.callbacks.recovery.spike_rollback.ranks import RUNS
from tests.callbacks.recovery.spike_rollback.runs import assert_same, rollback
from tests.launch import launch
from tests.pairwise import selected


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rolled_back")
    return launch("tests.callbacks.recovery.spike_rollback.ranks", 2, folder, *selected(request, "run"))


@pytest.mark.fast(
    *("ddp, adaptive, spike", "ddp, adaptive, nan, averaged", "ddp, fp8, nan"),
    *("fsdp2, adaptive, nan", "fsdp2, fp8, spike", "fsdp1, adaptive, spike"),
)
@pytest.mark.parametrize("run", RUNS)
def test_all_ranks_go_back_though_one_saw_the_bad_batch(results, run):
    found = [result[run] for result in results]
    for rank, one in enumerate(found):
        assert one["steps"] == [[9, 7, 4]], f"rank {rank}"
        assert_same(one["weights"], one["clean"], f"rank {rank}: not the run without these batches")
    assert found[0]["good"] == found[1]["good"], "ranks have judged other losses"


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_state_of_an_earlier_version_loads(is_ours):
    state = {
        "good": [3.0, 1.0, 2.0],
        "seen": 9,
        "pending": [(11, 2.5), (12, None)],
        "rollbacks": [{"step": 8, "spike": 6, "loss": 9.0, "mean": 2.0, "to": 4}],
        "until": 14,
        "phase_before": "fqt",
        "is_phase_ours": is_ours,
    }
    callback = rollback(phase="bf16", history=2)
    callback.load_state_dict(state)
    assert callback.state_dict() == {**state, "good": [1.0, 2.0], "start": 1.5}
