"""Fewer cases of a matrix: two markers say which of its cases are fast, and all others are slow.

``@pytest.mark.pairwise``: cases in which any two values of different axes meet, since most faults show for one value of
one axis and nearly all others for two. With ``pairwise(1)`` each value has one fast case, which is for an axis that is
much longer than the others. ``@pytest.mark.fast("id", "other-id")``: these, by the id in brackets.
"""

from collections import Counter, defaultdict
from itertools import combinations
from typing import Any

import pytest


def mark_slow(items):
    """Marks as slow what is not needed of tests that are ``pairwise`` or of which some cases are ``fast``."""
    matrices = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise") or item.get_closest_marker("fast"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for name, matrix in matrices.items():
        for item in _not_needed(name, matrix):
            item.add_marker("slow")


def _not_needed(name, matrix):
    if fast := {name for marker in matrix[0].iter_markers("fast") for name in marker.args}:
        unknown = fast - {item.callspec.id for item in matrix}
        if unknown and len(matrix) > 1:  # one alone has been asked for
            raise pytest.UsageError(f"{name} has no case {sorted(unknown)} to be fast")
        return [item for item in matrix if item.callspec.id not in fast]
    cases = [{name: id(value) for name, value in item.callspec.params.items()} for item in matrix]
    needed = cover(cases, *matrix[0].get_closest_marker("pairwise").args)
    return [item for number, item in enumerate(matrix) if number not in needed]


def cover(cases, together=2):
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


def selected(request, name):
    """The values that a parameter has in the selected tests that use the fixture which asks."""
    tests = [item for item in request.session.items if request.node in item.listchain() and hasattr(item, "callspec")]
    calls = [test.callspec for test in tests if request.fixturename in test.fixturenames]
    return list(dict.fromkeys(call.params[name] for call in calls if name in call.params))
