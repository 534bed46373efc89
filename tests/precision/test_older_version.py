"""Checkpoints of the version before load, and the runs go on from them as they did then, bit for bit."""

from pathlib import Path

import pytest
import torch

from tests.precision.older_version import RUNS, train

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_bit_for_bit(name):
    path = DATA / f"older_version_{name}.ckpt"
    ended_with = torch.load(path, weights_only=True)["ended_with"]
    if ended_with["cpu"] != torch.backends.cpu.get_cpu_capability():
        pytest.skip("sums of another kind of CPU have other bits")
    resumed = train(name, resume_from=path)
    uninterrupted = train(name)
    for was, is_now, whole in zip(ended_with["weights"], resumed, uninterrupted, strict=True):
        assert torch.equal(was, is_now), "resumed from the old checkpoint, the run ends elsewhere"
        assert torch.equal(was, whole), "the same run without a checkpoint ends elsewhere"
