"""The kernels on the GPU against the plain code on the CPU, to the bit, by the comparisons of ``tests/kernels``, which
run in Triton's interpreter elsewhere."""

import inspect
import itertools
from functools import partial

from tests.gpu.table import Check, Wrong
from tests.kernels import interpreted, steps, test_triton, test_triton_steps

# Comparisons of cases, which can be told apart; others are of a whole test.
OF_CASES = {
    interpreted.differences,
    interpreted.differences_of_amax,
    interpreted.differences_of_both,
    interpreted.differences_of_bytes,
    interpreted.differences_of_delay,
    interpreted.differences_of_finish,
    interpreted.differences_of_layout,
    interpreted.differences_of_packing,
    interpreted.differences_of_rotation,
    steps.differences,
}
OF_TESTS = {interpreted.shard, interpreted.differences_of_signs, steps.sample_is_near}
LAST = ("test_random_casts", "test_factors_and_bias")  # if time is left
SMALL = ("test_elements_in_the_dtypes_of_native_gemms", "test_no_elements", "test_the_largest_magnitude")
PIECE = 8  # cases of a check: each may compile a kernel, for a second or two
MOST = 5  # differences to tell


class Elsewhere(Exception):
    """A test asks for what is neither: it counts launches, or plays a fault."""


class Whole(Exception):
    """A test looks at results itself."""


def checks(setting):
    """Each test with the fixture ``run``, for each of its cases."""
    tests = [
        (name, test)
        for module in (test_triton_steps, test_triton)
        for name, test in vars(module).items()
        if name.startswith("test_") and "run" in inspect.signature(test).parameters
    ]
    for name, test in sorted(tests, key=lambda pair: pair[0].startswith(LAST)):
        if not setting.is_small or name in SMALL:
            for suffix, values in cases_of(test):
                yield from _pieces(name + suffix, partial(test, **values), setting.device)


def cases_of(test):
    """What ``parametrize`` gives a test, with a suffix for its name."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0].split(", ")
            axes.append([dict(zip(names, row if len(names) > 1 else [row], strict=True)) for row in mark.args[1]])
    for number, rows in enumerate(itertools.product(*axes)):
        values = {name: value for row in rows for name, value in row.items()}
        simple = [str(value) for value in values.values() if isinstance(value, str | int)]
        yield f"[{', '.join(simple) or number}]" if values else "", values


def _pieces(name, test, device):
    """The comparisons that a test asks for, some cases each."""
    calls = []

    def collect(function, *arguments):
        if function in OF_CASES:
            calls.append((function, *arguments))
            return []
        raise Whole if function in OF_TESTS else Elsewhere

    try:
        test(run=collect)
    except Whole:
        yield Check(name, partial(_whole, test, device))
        return
    except Elsewhere:
        return
    pieces = [
        (function, cases[first : first + PIECE], *others)
        for function, cases, *others in calls
        for first in range(0, len(cases), PIECE)
    ]
    for number, piece in enumerate(pieces, 1):
        yield Check(f"{name} {number}/{len(pieces)}", partial(_compare, device, *piece))


def _whole(test, device):
    def run(function, *arguments):
        return function(*arguments)

    with interpreted.kernels_on(device):
        try:
            test(run=run)
        except AssertionError as fault:
            raise Wrong(str(fault) or "the test does not hold") from fault


def _compare(device, function, cases, *others):
    with interpreted.kernels_on(device):
        texts = function(cases, *others)
    if texts:
        raise Wrong("; ".join(texts[:MOST]) + (f"; and {len(texts) - MOST} more" if len(texts) > MOST else ""))
    return
