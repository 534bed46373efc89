import pytest
import torch
import torch.nn.functional as F

from lightning_lowbit.nn.native import devices
from lightning_lowbit.nn.native.table import BLOCK_SCALED
from tests.nn.native.stand_in import StandIn


@pytest.fixture
def scaled_mm(monkeypatch):
    """As if the CPU had block-scaled tensor cores."""
    stand_in = StandIn()
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    devices._trial_obstacle.cache_clear()
    with devices.declared("cpu", BLOCK_SCALED - {"cpu"}):
        assert [devices.native_obstacle(torch.device("cpu"), kind) for kind in BLOCK_SCALED - {"cpu"}] == [None] * 4
        stand_in.calls.clear()
        yield stand_in
    devices._trial_obstacle.cache_clear()
