"""Models that others wrote train in NVFP4, and as much of them is quantized as the tables say."""

from functools import partial

import pytest

from tests.strangers.architectures import ARCHITECTURES
from tests.strangers.packages import STRANGERS
from tests.strangers.training import train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_type_of_transformers_is_covered(kind):
    row = ARCHITECTURES[kind]
    coverage, uncovered = train(partial(row.build, kind), row.batch())
    assert 100 * coverage >= row.least, uncovered


@pytest.mark.parametrize("name", STRANGERS)
def test_a_model_of_another_package_is_covered(name):
    row = STRANGERS[name]
    if not row.is_installed:
        pytest.skip(f"{row.package} is not installed")
    coverage, uncovered = train(row.build, row.batch())
    assert 100 * coverage >= row.least, uncovered
