"""Both ranks go back though one alone saw the bad batch."""

import pytest

from tests.callbacks.recovery.spike_rollback.ranks import RUNS
from tests.callbacks.recovery.spike_rollback.runs import assert_same
from tests.launch import launch
from tests.pairwise import selected


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rolled_back")
    return launch("tests.callbacks.recovery.spike_rollback.ranks", 2, folder, *selected(request, "run"))


@pytest.mark.fast("ddp, adaptive, nan, averaged", "fsdp2, fp8, spike")
@pytest.mark.parametrize("run", RUNS)
def test_all_ranks_go_back_though_one_saw_the_bad_batch(results, run):
    found = [result[run] for result in results]
    for rank, one in enumerate(found):
        assert one["steps"] == [[9, 7, 4]], f"rank {rank}"
        assert_same(one["weights"], one["clean"], f"rank {rank}: not the run without these batches")
    assert found[0]["good"] == found[1]["good"], "ranks have judged other losses"
