"""A table fails with the row that is wrong, and its rows know nothing of each other."""

import os

import pytest
import torch

from tests.tables import each


def test_every_row_is_run_and_the_first_that_fails_is_named():
    seen = []

    @each("y", [5, 6])
    @each("x, square", [(2, 4), pytest.param(3, 9, id="three"), (4, 17), (5, 25)])
    def squares(x, square, y):
        seen.append((x, y))
        assert x * x == square

    with pytest.raises(AssertionError) as failure:
        squares()
    assert seen == [(2, 5), (3, 5), (4, 5)]
    assert failure.value.__notes__ == ["in the row {'x': 4, 'square': 17}", "in the row {'y': 5}"]


def test_rows_start_alike(monkeypatch):
    drawn = []

    @each("number", range(3))
    def rows(number, monkeypatch):
        assert "ROW" not in os.environ
        monkeypatch.setenv("ROW", str(number))
        drawn.append(torch.rand(()).item())

    rows(monkeypatch=monkeypatch)
    assert "ROW" not in os.environ
    assert len(drawn) == 3 and len(set(drawn)) == 1
