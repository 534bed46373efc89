"""The fast cases of a matrix hold every pair of values."""

from itertools import combinations, product

import pytest

from tests.pairwise import cover


def matrix(*sizes: int) -> list[dict[str, int]]:
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
