"""Checkpoints of an older version load, and runs that resume from them end where they ended then.

Not to the last bit: that version updated weights by torch's fused Adam, whose operations have another order. The state
of every rule and random bit has its part in where a run ends.
"""

from pathlib import Path

import pytest
import torch

from lightning_lowbit import compilation
from lightning_lowbit.quant import scaling
from lightning_lowbit.quant.rounding import uniform
from tests.precision.checkpoints.older_version import RUNS, train

DATA = Path(__file__).parents[2] / "data"

# The checkpoints come from a CPU whose bf16 GEMMs are made of AVX-512's pairwise products. Other GEMMs sum in another
# order, which now and then moves an operand to the next number of its format.
SAME_SUMS = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


@pytest.fixture(autouse=True)
def a_hash_for_each_element(monkeypatch):
    """That version did not share hashes among four elements."""
    monkeypatch.setattr(scaling, "uniform_by_fours", uniform)
    with compilation.backend("eager"):  # the code that the line above changes
        yield


def recorded(name):
    checkpoint = torch.load(DATA / f"older_version_{name}.ckpt", weights_only=True)
    return list(checkpoint["state_dict"].values()), checkpoint["ended_with"]["weights"]


@pytest.mark.filterwarnings("ignore:The loaded checkpoint was produced with Lightning")  # by a newer one than 2.6.0
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes(name):
    began_with, ended_with = recorded(name)
    resumed = train(name, resume_from=DATA / f"older_version_{name}.ckpt")
    for began, was, found in zip(began_with, ended_with, resumed, strict=True):
        if name == "fp8":
            # That version drew other random bits for the moments. Without one of them it is 60 % of the way and more.
            assert (found - was).norm() <= 0.1 * (was - began).norm()
        elif SAME_SUMS:
            # Three float32 roundings of the largest weight.
            assert (found - was).abs().max() <= 4e-7 * was.abs().max()
        else:
            # Without the moments, with other random bits or in another phase it is 2 % of the way and more.
            assert (found - was).norm() <= 0.01 * (was - began).norm()


@pytest.mark.skipif(not SAME_SUMS, reason="the recorded runs have the sums of AVX-512 BF16")
@pytest.mark.parametrize("name", [name for name in RUNS if name != "fp8"])
def test_an_uninterrupted_run_ends_there_too(name):
    for was, found in zip(recorded(name)[1], train(name), strict=True):
        assert (found - was).abs().max() <= 4e-7 * was.abs().max()
