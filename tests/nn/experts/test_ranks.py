"""Experts of several processes: whose weights are sharded, or that are spread, compute as those of one process do."""

import pytest
import torch
import transformers
from packaging.version import Version

from tests.launch import launch
from tests.nn.experts.ranks_experts import RANKS, RUNS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return launch("tests.nn.experts.ranks_experts", RANKS, tmp_path_factory.mktemp("shared"), "shared")


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    if Version(transformers.__version__) < Version("5.15"):
        pytest.skip("transformers before 5.15 spreads experts otherwise")
    return launch("tests.nn.experts.ranks_experts", RANKS, tmp_path_factory.mktemp("apart"), "apart")


def equal(name, one, other, rtol=1e-6, atol=1e-7, of_losses=1e-6):
    assert one["losses"].isfinite().all()
    torch.testing.assert_close(other["losses"], one["losses"], rtol=of_losses, atol=0, msg=name)
    for a, b in zip(other["weights"], one["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=name)


def test_losses_and_weights_are_those_of_one_process(shared):
    for results in shared:
        for name, runs in results["runs"].items():
            equal(name, *runs, of_losses=0)
        assert results["runs"]["packed"][1]["gathered"] == ["QuantLinear"], "stacks are gathered in high precision"
        for name, losses in results["wrapped"].items():
            assert torch.equal(losses, results["wrapped"]["whole"]), name
        assert "gather it by FSDP2" in results["refusal"]


def test_experts_that_are_spread_are_those_of_one_process(apart):
    for results in apart:
        assert [*results["runs"]] == [*RUNS]
        for name, runs in results["runs"].items():
            equal(name, *runs)
        assert "Spread them by expert" in results["refusal"]


def test_a_trainer_trains_clips_and_resumes_them(apart):
    for results in apart:
        for name, runs in results["fits"].items():
            equal(name, *runs, **({"rtol": 0, "atol": 0, "of_losses": 0} if name == "resumed" else {"atol": 1e-6}))
