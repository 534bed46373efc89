"""Expert parallelism: experts that are spread over processes are quantized as those of one process."""

import pytest
import torch
import transformers
from packaging.version import Version

from tests.launch import launch
from tests.nn.experts.ranks_parallel import RANKS, RUNS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.15"), reason="transformers before 5.15 spreads experts otherwise"
    ),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch("tests.nn.experts.ranks_parallel", RANKS, tmp_path_factory.mktemp("ranks"))


def test_losses_and_weights_are_those_of_one_process(ranks):
    for results in ranks:
        assert [*results["runs"]] == [*RUNS]
        for name, runs in results["runs"].items():
            equal(name, *runs)


def test_a_trainer_trains_clips_and_resumes_them(ranks):
    for results in ranks:
        for name, runs in results["fits"].items():
            equal(name, *runs, **({"rtol": 0, "atol": 0} if name == "resumed" else {"atol": 1e-6}))


def equal(name, one, other, rtol=1e-6, atol=1e-7):
    torch.testing.assert_close(other["losses"], one["losses"], rtol=rtol, atol=0, msg=name)
    for a, b in zip(other["weights"], one["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=name)


def test_experts_whose_matrices_are_cut_are_refused(ranks):
    for results in ranks:
        assert "Spread them by expert" in results["refusal"]
