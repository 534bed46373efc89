"""Small pieces and an early SpikeClip for all tests of this folder."""

import pytest

from lightning_lowbit.optim.passes import in_pieces
from tests.optim.parameters import clip_spikes_early


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Even small tensors are worked on in pieces, and SpikeClip does not wait for 20 steps."""
    clip_spikes_early(monkeypatch)
    with in_pieces(12):
        yield
