import pytest

from tests.optim.parameters import use


@pytest.fixture(params=["C++", "torch"])
def code(request):
    """The code that makes a step on a CPU."""
    with use(request.param):
        yield request.param
