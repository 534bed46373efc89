"""Fewer cases of a matrix: two markers say which of its cases are fast, which are slow, and which are left out.

``@pytest.mark.pairwise``: fast are cases in which any two values of different axes meet, since most faults show for one
value of one axis and nearly all others for two; slow are more of them, in which any three meet; the rest is left out.
With ``pairwise(1)`` each value has one fast case, which is for an axis that is much longer than the others.
``@pytest.mark.fast("id", "other-id")``: these, by the id in brackets, and all others are slow.
"""

from collections import Counter, defaultdict
from itertools import combinations
from typing import Any

import pytest


def mark_slow(items, leaves_out=True):
    """Marks as slow what is not fast of tests that are ``pairwise`` or of which some cases are ``fast``.

    Args:
        leaves_out: whether slow cases are run, of which those in which three values meet are enough.

    Returns:
        What is left out.
    """
    matrices = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise") or item.get_closest_marker("fast"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    left_out = []
    for name, matrix in matrices.items():
        if matrix[0].get_closest_marker("fast"):
            fast, needed = _named(name, matrix), {*range(len(matrix))}
        else:
            cases = [{name: id(value) for name, value in item.callspec.params.items()} for item in matrix]
            fast = cover(cases, *matrix[0].get_closest_marker("pairwise").args)
            needed = cover(cases, 3, fast) if leaves_out else {*range(len(matrix))}
        for number, item in enumerate(matrix):
            if number not in needed:
                left_out.append(item)
            elif number not in fast:
                item.add_marker("slow")
    return left_out


def _named(name, matrix):
    fast = {name for marker in matrix[0].iter_markers("fast") for name in marker.args}
    unknown = fast - {item.callspec.id for item in matrix}
    if unknown and len(matrix) > 1:  # one alone has been asked for
        raise pytest.UsageError(f"{name} has no case {sorted(unknown)} to be fast")
    return {number for number, item in enumerate(matrix) if item.callspec.id in fast}


def cover(cases, together=2, chosen=()):
    """The numbers of some of these cases, in which any ``together`` values meet that meet in one of them all.

    Args:
        cases: what stands for the value on each axis.
        chosen: numbers of cases that are among them anyway.
    """
    meetings = [set(combinations(sorted(case.items()), min(together, len(case)))) for case in cases]
    pairs = [list(combinations(sorted(case.items()), 2)) for case in cases]
    missing, often, chosen = set().union(*meetings), Counter[Any](), set(chosen)
    for number in chosen:
        missing -= meetings[number]
        often.update(pairs[number])
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
