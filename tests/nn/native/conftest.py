import pytest
import torch.nn.functional as F

from lightning_lowbit.nn.native import devices
from lightning_lowbit.nn.native.table import BLOCK_SCALED
from tests.nn.native.stand_in import StandIn


@pytest.fixture
def scaled_mm(monkeypatch):
    """As if the CPU had block-scaled tensor cores."""
    stand_in = StandIn()
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    monkeypatch.setattr(
        "lightning_lowbit.nn.layers.native.native_obstacle",
        lambda _, kind: None if kind in BLOCK_SCALED else "no such unit",
    )
    devices._trial_obstacle.cache_clear()
    yield stand_in
    devices._trial_obstacle.cache_clear()
