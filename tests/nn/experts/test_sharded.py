"""Experts whose weights are sharded compute as whole ones do."""

import pytest
import torch

from tests.launch import launch
from tests.nn.experts.ranks_experts import RANKS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch("tests.nn.experts.ranks_experts", RANKS, tmp_path_factory.mktemp("ranks"))


def test_losses_and_weights_are_those_of_one_process(ranks):
    for results in ranks:
        for whole, sharded in results["runs"].values():
            assert torch.equal(whole["losses"], sharded["losses"])
            assert whole["losses"].isfinite().all()
            for a, b in zip(whole["weights"], sharded["weights"], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_ddp_and_fsdp1_have_the_losses_of_one_process(ranks):
    for results in ranks:
        for name, found in results["wrapped"].items():
            assert torch.equal(found, results["wrapped"]["whole"]), name


def test_stacks_are_gathered_in_high_precision(ranks):
    for results in ranks:
        assert results["runs"]["packed"][1]["gathered"] == ["QuantLinear"]


def test_stacks_that_are_cut_otherwise_are_refused(ranks):
    for results in ranks:
        assert "gather it by FSDP2" in results["refusal"]
