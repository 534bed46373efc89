"""Small pieces and an early SpikeClip for all tests of this folder."""

import pytest

from lightning_lowbit.optim import rules
from tests.optim.parameters import in_pieces


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Even small tensors are worked on in pieces, and SpikeClip does not wait for 20 steps."""
    in_pieces(12, monkeypatch)
    monkeypatch.setattr(rules, "SPIKE_CLIP_AFTER", 2)
