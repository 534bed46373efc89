import pytest
import torch
import torch.nn.functional as F

from lightning_lowbit.compilation import backend
from lightning_lowbit.nn.native import devices
from tests.nn.native.stand_in import OF_GPUS, StandIn


@pytest.fixture(autouse=True)
def _emulated_blocks():
    """As the CPU is: these tests are about devices."""


@pytest.fixture
def scaled_mm(monkeypatch):
    """As if the CPU had block-scaled tensor cores."""
    stand_in = StandIn()
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    devices._trial_obstacle.cache_clear()
    with devices.declared("cpu", OF_GPUS):
        with backend("eager"):  # compiling the samples takes longer than all that follows
            assert [devices.native_obstacle(torch.device("cpu"), kind) for kind in OF_GPUS] == [None] * 4
        stand_in.calls.clear()
        yield stand_in
    devices._trial_obstacle.cache_clear()
