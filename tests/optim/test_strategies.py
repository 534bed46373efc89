"""The optimizers under Lightning's strategies: the trajectory of one process, and checkpoints that go on."""

import pytest
import torch

from tests.launch import launch
from tests.optim.ranks_lightning import INTERRUPTED, OPTIMIZERS, RANKS, RUNS, alone, describe

RESUMING = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainers")


@pytest.fixture(scope="module")
def results(folder):
    return launch("tests.optim.ranks_lightning", RANKS, folder)


@pytest.fixture(scope="module")
def expected():
    """Weights after an uninterrupted run in one process."""
    return {name: alone(name) for name in OPTIMIZERS}


def assert_near(found, wanted):
    # Eight steps of 1e-3 in fp32; where ranks sum in another order, 2e-8 comes of it.
    assert len(found) == len(wanted), f"{len(found)} parameters, wanted {len(wanted)}"
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=lambda text, n=number: f"parameter {n}: {text}")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: describe(*run))
def test_trajectory(results, expected, run):
    for result in results:
        assert_near(result[describe(*run)], expected[run[1]])


@pytest.mark.parametrize(("strategy", "optimizer"), INTERRUPTED)
def test_resumed_run_is_the_uninterrupted_one(results, expected, strategy, optimizer):
    for result in results:
        assert_near(result[f"{strategy} {optimizer}.ckpt"], expected[optimizer])


@RESUMING
@pytest.mark.parametrize("optimizer", ["stable_spam", "fp8"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2, whole checkpoints"])
def test_one_process_goes_on_from_a_checkpoint_of_two(results, folder, expected, strategy, optimizer):
    assert_near(alone(optimizer, str(folder / f"{strategy} {optimizer}.ckpt")), expected[optimizer])


def test_fsdp1_without_a_plugin_is_refused_with_the_remedy(results):
    for rank, result in enumerate(results):
        told = result.get("not connected", "nothing was refused")
        for word in ("LowBitPrecision", "lightning_lowbit.optim.connect"):
            assert word in told, f"rank {rank} was told: {told}"
