"""Checkpoints of an older version load, and runs that resume from them end where they ended then.

Not to the last bit: that version updated weights by torch's fused Adam, whose operations have another order. The state
of every rule and random bit has its part in where a run ends.
"""

from pathlib import Path

import pytest
import torch

from tests.precision.checkpoints.older_version import RUNS, train

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes(name):
    path = DATA / f"older_version_{name}.ckpt"
    ended_with = torch.load(path, weights_only=True)["ended_with"]
    resumed = train(name, resume_from=path)
    uninterrupted = train(name)
    for was, is_now, whole in zip(ended_with["weights"], resumed, uninterrupted, strict=True):
        tolerance = 4e-7 * was.abs().max().item()  # three float32 roundings of the largest weight
        for found, what in ((is_now, "resumed from the old checkpoint"), (whole, "without a checkpoint")):
            error = (found - was).abs().max().item()
            assert error <= tolerance, f"{what}, the run ends {error} from where it ended"
