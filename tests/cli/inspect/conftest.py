"""Tables without their pictures."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def no_pictures(monkeypatch):
    """They are empty files: drawing takes longer than all else."""
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch())
