"""A table fails with the row that is wrong, and its rows know nothing of each other; the fast cases of a matrix hold
every pair of values."""

import os
from itertools import combinations, product

import pytest
import torch

from tests.pairwise import cover
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


def matrix(*sizes):
    return [dict(zip("abcdef", case, strict=False)) for case in product(*map(range, sizes))]


@pytest.mark.parametrize(
    ("sizes", "together", "most"), [((4, 3, 3, 2), 2, 14), ((20, 2, 2), 1, 20), ((3,), 2, 3), ((2, 3, 2, 2), 3, 16)]
)
def test_all_values_meet_in_few_cases(sizes, together, most):
    cases = matrix(*sizes)
    chosen = [cases[number] for number in cover(cases, together)]
    assert len(chosen) <= most
    for axes in combinations("abcdef"[: len(sizes)], min(together, len(sizes))):
        assert {tuple(case[axis] for axis in axes) for case in chosen} == {
            tuple(case[axis] for axis in axes) for case in cases
        }


def test_values_that_never_meet_are_not_missed():
    cases = [case for case in matrix(3, 3) if case["a"] != case["b"]]
    assert cover(cases) == set(range(6))
