import pytest

from tests.launch import launch
from tests.pairwise import selected
from tests.precision.ranks_ddp import RANKS


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """What each of two processes made of everything."""
    return launch("tests.precision.ranks_ddp", RANKS, tmp_path_factory.mktemp("ddp"), *selected(request, "counted"))
