"""Expert parallelism: experts that are spread over processes are quantized as those of one process."""

from typing import Any

import pytest
import torch

from tests.launch import launch
from tests.nn.experts.ranks_parallel import RANKS, RUNS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("tests.nn.experts.ranks_parallel", RANKS, tmp_path_factory.mktemp("ranks"))


def test_losses_and_weights_are_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert [*results["runs"]] == [*RUNS]
        for name, (whole, spread) in results["runs"].items():
            torch.testing.assert_close(spread["losses"], whole["losses"], rtol=1e-6, atol=0, msg=name)
            for a, b in zip(spread["weights"], whole["weights"], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)


def test_experts_whose_matrices_are_cut_are_refused(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert "Spread them by expert" in results["refusal"]
