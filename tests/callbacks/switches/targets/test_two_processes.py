"""Switches on two processes."""

import torch

from tests.callbacks.switches.runs import RESUMES
from tests.callbacks.switches.targets.ranks import RANKS, TOKENS
from tests.launch import launch

pytestmark = RESUMES


def test_two_processes(tmp_path):
    """Ranks with different numbers of tokens switch at one step, and go on from a checkpoint of any."""
    ranks = launch("tests.callbacks.switches.targets.ranks", RANKS, tmp_path)
    first, second = ranks
    assert first.keys() == second.keys()
    for name in first:
        a, b = first[name], second[name]
        assert a["seen"] == b["seen"], f"{name}: the ranks have switched at different steps"
        assert a["seen"][-1] == [6, "qaf", "mxfp4", "nvfp4"]
        steps = [step for step, phase, _, _ in a["seen"] if phase == "qaf"]
        # 40 and 5 tokens in a step: 45 k are TOKENS or more.
        assert steps[0] == -(-TOKENS // 45)
        for resumed, weights in a["resumed"].items():
            for whole, part in zip(a["weights"], weights, strict=True):
                assert torch.equal(whole, part), f"{name}, resumed after step {resumed}: other weights"
    for whole, sharded in zip(first["ddp"]["weights"], first["fsdp2"]["weights"], strict=True):
        torch.testing.assert_close(whole, sharded)
    assert first["ddp"]["record"] == first["fsdp2"]["record"]
