"""FP8 on two processes: one history for both, one collective per step, and none elsewhere."""

from collections import Counter

import pytest
import torch

from tests.precision.ranks_ddp import ACCUMULATE, COUNTED, HISTORY, SMOOTHINGS, STEPS
from tests.precision.regression_model import DOWN, LAYERS, Witness, assert_histories, assert_in_force


def assert_equal_states(a, b):
    assert a.keys() == b.keys()
    for kind in ("amax_history", "channel_amax"):
        assert a[kind].keys() == b[kind].keys()
        for key in a[kind]:
            assert torch.equal(a[kind][key], b[kind][key]), f"{kind} of {key} differs: {a[kind][key]}, {b[kind][key]}"


@pytest.mark.parametrize("smooth", SMOOTHINGS)
def test_both_ranks_have_the_histories_of_what_both_saw(results, smooth):
    ranks = [result["histories"][str(smooth)] for result in results]
    for rank in ranks:
        assert len(rank["steps"]) == STEPS
        assert rank["validated"] > 0, "there was no validation"
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"]), "the ranks have trained different weights"
    assert_equal_states(ranks[0]["state"], ranks[1]["state"])
    keys = ("head/fprop_x", "head/dgrad_g")
    larger = {
        step[key] > other[key] for step, other in zip(*(rank["steps"] for rank in ranks), strict=True) for key in keys
    }
    assert larger == {True, False}, "one rank has the largest of everything: nothing shows that both count"

    witness = Witness()
    witness.steps = [
        {key: max(a[key], b[key]) for key in a} for a, b in zip(*(rank["steps"] for rank in ranks), strict=True)
    ]
    found = ranks[0]["state"]
    assert {key.split("/")[0] for key in found["amax_history"]} == set(LAYERS)
    assert_histories(found["amax_history"], witness, HISTORY)
    for rank in ranks:
        witness.in_force = rank["in_force"]
        assert_in_force(found["amax_history"], witness, HISTORY)
    assert list(found["channel_amax"]) == ([DOWN] if smooth else [])
    for name, amax in found["channel_amax"].items():
        expected = torch.maximum(*(rank["channels"][name] for rank in ranks))
        assert torch.equal(amax, expected), "the channels are not the largest of both ranks"
        assert not any(torch.equal(amax, rank["channels"][name]) for rank in ranks)


@pytest.mark.fast("current", "current, channels smoothed", "delayed, tokens smoothed")
@pytest.mark.parametrize("counted", [name for name in COUNTED if name != "without the plugin"])
def test_collectives(results, counted):
    """One more per optimizer step where there are histories, whatever their number; nowhere else any."""
    more = STEPS if "delayed" in counted or "channels" in counted else 0
    for result in results:
        counts, plain = result["collectives"][counted], result["collectives"]["without the plugin"]
        assert plain["training"]["allreduce_"] >= STEPS, "the gradients' own collectives have not been counted"
        expected = Counter(plain["training"]) + Counter({"allreduce_": more})
        assert counts["training"] == expected, f"{STEPS} steps of {ACCUMULATE} micro-batches have other collectives"
        assert counts["evaluation"] == plain["evaluation"], "evaluation has other collectives than without the plugin"


def test_resume_equals_the_uninterrupted_run(results):
    for result in results:
        whole, resumed, fresh = result["whole"], result["resumed"], result["fresh"]
        losses = whole["losses"][2 * ACCUMULATE :]
        assert len(losses) == (STEPS - 2) * ACCUMULATE
        assert torch.equal(resumed["losses"], losses), "losses after the resume differ"
        assert torch.equal(resumed["weights"], whole["weights"]), "final weights differ"
        assert_equal_states(resumed["state"], whole["state"])
        assert not torch.equal(fresh["losses"], losses), "the histories make no difference"
    assert torch.equal(results[0]["resumed"]["weights"], results[1]["resumed"]["weights"])
    assert_equal_states(results[0]["resumed"]["state"], results[1]["resumed"]["state"])
    assert not torch.equal(results[0]["whole"]["losses"], results[1]["whole"]["losses"]), "the ranks see the same data"
