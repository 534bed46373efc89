import logging
from typing import Any

import pytest

from tests.launch import launch
from tests.pairwise import selected
from tests.precision.ranks_ddp import RANKS


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes made of everything."""
    return launch("tests.precision.ranks_ddp", RANKS, tmp_path_factory.mktemp("ddp"), *selected(request, "counted"))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    # Any of them may be the one of rank_zero_info.
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog
