"""Small pieces and an early SpikeClip for all tests of this folder."""

import pytest

from lightning_lowbit.optim import passes, rules


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Even small tensors are worked on in pieces, and SpikeClip does not wait for 20 steps."""
    monkeypatch.setattr(passes, "PIECE_ON_CPU", 12)
    monkeypatch.setattr(passes, "PIECE_ON_ACCELERATOR", 12)
    monkeypatch.setattr(rules, "SPIKE_CLIP_AFTER", 2)
