"""States damaged at random, loaded in processes of their own."""

import pytest

from tests.launch import start, wait


def load_damaged(folder, first, count):
    log = folder / f"{first}.log"
    codes = wait([start(log, "tests.optim.damaged_states", str(first), str(count))])
    assert codes == [0], log.read_text()[-3000:]


def test_damaged_states_are_refused_or_go_on(tmp_path):
    load_damaged(tmp_path, 0, 60)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 1100, 500))
def test_more_damaged_states_are_refused_or_go_on(first, tmp_path):
    load_damaged(tmp_path, first, 500)
