"""Small pieces and an early SpikeClip for all tests of this folder."""

import pytest

from lightning_lowbit.optim.passes import in_pieces
from lightning_lowbit.optim.rules import spikes_clipped_after


@pytest.fixture(autouse=True)
def small_pieces():
    """Even small tensors are worked on in pieces, and SpikeClip does not wait for 20 steps."""
    with in_pieces(12), spikes_clipped_after(2):
        yield
