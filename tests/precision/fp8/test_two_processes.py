"""FP8 on two processes: one history for both, one collective per step and for the seed, and none elsewhere."""

from collections import Counter

import pytest
import torch

from tests.launch import launch
from tests.pairwise import selected
from tests.precision.fp16.runs import assert_same
from tests.precision.ranks_ddp import ACCUMULATE, COUNTED, HISTORY, RANKS, SMOOTHINGS, STEPS
from tests.precision.regression_model import DOWN, LAYERS, Witness, assert_histories


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    return launch("tests.precision.ranks_ddp", RANKS, tmp_path_factory.mktemp("ddp"), *selected(request, "counted"))


@pytest.mark.parametrize("smooth", SMOOTHINGS)
def test_both_ranks_have_the_histories_of_what_both_saw(results, smooth):
    ranks = [result["histories"][str(smooth)] for result in results]
    for rank in ranks:
        assert len(rank["steps"]) == STEPS
        assert rank["validated"] > 0, "there was no validation"
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"]), "the ranks have trained different weights"
    assert_same(ranks[1]["state"], ranks[0]["state"], "rank 1")
    first, second = (rank["steps"] for rank in ranks)
    larger = {a[key] > b[key] for a, b in zip(first, second, strict=True) for key in ("head/fprop_x", "head/dgrad_g")}
    assert larger == {True, False}, "one rank has the largest of everything: nothing shows that both count"
    witness, found = Witness(), ranks[0]["state"]
    witness.steps = [{key: max(a[key], b[key]) for key in a} for a, b in zip(first, second, strict=True)]
    assert {key.split("/")[0] for key in found["amax_history"]} == {*LAYERS}
    assert list(found["channel_amax"]) == ([DOWN] if smooth else [])
    for rank in ranks:
        witness.channels = {
            name: torch.maximum(*(rank["channels"][name] for rank in ranks)) for name in found["channel_amax"]
        }
        witness.in_force = rank["in_force"]
        assert_histories(found, witness, HISTORY)
        assert not any(torch.equal(amax, rank["channels"][name]) for name, amax in found["channel_amax"].items())


@pytest.mark.fast("current", "delayed, tokens smoothed")
@pytest.mark.parametrize("counted", [name for name in COUNTED if name != "without the plugin"])
def test_collectives(results, counted):
    """One more per optimizer step where there are histories, whatever their number, and for the seed that of an object,
    its size and its bytes, when training begins; nowhere else any."""
    more = STEPS if "delayed" in counted or "channels" in counted else 0
    for result in results:
        counts, plain = result["collectives"][counted], result["collectives"]["without the plugin"]
        assert plain["training"]["allreduce_"] >= STEPS, "the gradients' own collectives have not been counted"
        expected = Counter(plain["training"]) + Counter({"allreduce_": more, "broadcast_": 2})
        assert counts["training"] == expected, f"{STEPS} steps of {ACCUMULATE} micro-batches have other collectives"
        assert counts["evaluation"] == plain["evaluation"], "evaluation has other collectives than without the plugin"
