"""Fewer cases of a matrix: any two values of different axes meet in one of them.

Most faults show for one value of one axis, nearly all others for two. So of a test with several ``parametrize`` and
``@pytest.mark.pairwise`` a few cases are fast and all others slow. With ``pairwise(1)`` each value has one fast case,
which is for an axis that is much longer than the others.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Marks what is not needed of tests that are ``pairwise``."""
    matrices: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for matrix in matrices.values():
        cases = [{name: id(value) for name, value in item.callspec.params.items()} for item in matrix]
        needed = cover(cases, *matrix[0].get_closest_marker("pairwise").args)
        for number, item in enumerate(matrix):
            if number not in needed:
                item.add_marker("slow")


def cover(cases: Sequence[dict[str, int]], together: int = 2) -> set[int]:
    """The numbers of some of these cases, in which any ``together`` values meet that meet in one of them all.

    Args:
        cases: what stands for the value on each axis.
    """
    meetings = [set(combinations(sorted(case.items()), min(together, len(case)))) for case in cases]
    pairs = [list(combinations(sorted(case.items()), 2)) for case in cases]
    missing, often, chosen = set().union(*meetings), Counter[Any](), set[int]()
    while missing:
        # The more values meet for the first time, the better; then, the less often its pairs have met.
        best = max(
            (number for number, met in enumerate(meetings) if met & missing),
            key=lambda i: (len(meetings[i] & missing), -sum(often[pair] for pair in pairs[i]), -i),
        )
        chosen.add(best)
        missing -= meetings[best]
        often.update(pairs[best])
    return chosen


def some(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters of which these are fast and all others slow."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values that a parameter has in the selected tests that use the fixture which asks."""
    tests = [item for item in request.session.items if request.fixturename in getattr(item, "fixturenames", ())]
    calls = [test.callspec for test in tests if hasattr(test, "callspec")]
    return list(dict.fromkeys(call.params[name] for call in calls if name in call.params))
