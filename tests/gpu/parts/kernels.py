"""The kernels on the GPU against the plain code on the CPU, to the bit, by the comparisons of ``tests/kernels``, which
run in Triton's interpreter elsewhere."""

import inspect
import itertools

from tests.gpu.table import Check, Skipped, Wrong
from tests.kernels import interpreted, steps, test_triton, test_triton_steps

COMPARISONS = {
    interpreted.differences,
    interpreted.differences_of_amax,
    interpreted.differences_of_both,
    interpreted.differences_of_delay,
    interpreted.differences_of_finish,
    interpreted.differences_of_layout,
    interpreted.differences_of_packing,
    interpreted.differences_of_rotation,
    interpreted.shard,
    steps.differences,
    steps.sample_is_near,
}
SMALL = ("test_elements_in_the_dtypes_of_native_gemms", "test_no_elements", "test_the_largest_magnitude")
MOST = 5  # differences to tell


def checks(setting):
    """Each test with the fixture ``run``, for each of its cases."""
    for module in (test_triton, test_triton_steps):
        for name, test in vars(module).items():
            if name.startswith("test_") and "run" in inspect.signature(test).parameters:
                for suffix, case in cases_of(test):
                    if not setting.is_small or name in SMALL:
                        yield Check(name + suffix, lambda test=test, case=case: compare(test, case, setting.device))


def cases_of(test):
    """What ``parametrize`` gives a test, with a suffix for its name."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0].split(", ")
            axes.append([dict(zip(names, row if len(names) > 1 else [row], strict=True)) for row in mark.args[1]])
    for number, rows in enumerate(itertools.product(*axes)):
        case = {name: value for row in rows for name, value in row.items()}
        simple = [str(value) for value in case.values() if isinstance(value, str | int)]
        yield f"[{', '.join(simple) or number}]" if case else "", case


def compare(test, case, device):
    def run(function, *arguments):
        if function not in COMPARISONS:
            raise Skipped(f"{function.__name__} counts launches or plays a fault, on any machine")
        result = function(*arguments)
        if isinstance(result, list) and result:
            raise Wrong("; ".join(result[:MOST]) + (f"; and {len(result) - MOST} more" if len(result) > MOST else ""))
        return result

    with interpreted.kernels_on(device):
        test(run, **case)
