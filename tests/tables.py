"""Tables that one test goes through: a case costs what it computes, and no test of its own."""

import inspect
from contextlib import ExitStack
from functools import wraps

import pytest
import torch

# Without an accelerator, torch.manual_seed only takes longer: it keeps the stack, for an accelerator that may yet come.
SEED = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


def each(names, rows, fast=None):
    """``@pytest.mark.parametrize`` in one test, which ends with the first row that fails and names it.

    Each row starts with the same seed and with nothing patched by ``monkeypatch``. All else that fixtures give is of
    the whole test: a row leaves nothing there.

    Args:
        fast: the number of rows, spread over the table, that the test goes through; a slow one has the rest.
            None for all.
    """
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = [dict(zip(columns, _values(row, len(columns)), strict=True)) for row in rows]
    assert cases, f"no rows of {names}"
    chosen = range(len(cases)) if fast is None else [number * len(cases) // fast for number in range(fast)]
    few, others = [cases[i] for i in chosen], [case for i, case in enumerate(cases) if i not in chosen]

    def decorate(test):
        @wraps(test)
        def go_through(cases_of_test=few, **given):
            for case in cases_of_test:
                SEED(0)
                with ExitStack() as row:
                    if "monkeypatch" in given:
                        given["monkeypatch"] = row.enter_context(pytest.MonkeyPatch.context())
                    try:
                        test(**given, **case)
                    except BaseException as error:  # also what pytest.fail raises
                        error.add_note(f"in the row {case}")
                        raise

        signature = inspect.signature(test)
        rest = [argument for name, argument in signature.parameters.items() if name not in columns]
        if fast is None:
            go_through.__signature__ = signature.replace(parameters=rest)
            return go_through
        part = inspect.Parameter("cases_of_test", inspect.Parameter.KEYWORD_ONLY)
        go_through.__signature__ = signature.replace(parameters=[*rest, part])
        parts = pytest.param(few, id="some"), pytest.param(others, id="others", marks=pytest.mark.slow)
        return pytest.mark.parametrize("cases_of_test", parts)(go_through)

    return decorate


def deterministic(examples):
    """Settings of hypothesis without a seed; it draws constants of loaded modules too, so other tests still count."""
    from hypothesis import HealthCheck, settings  # here, since few tests use it

    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    options = {"derandomize": True, "database": None, "deadline": None, "suppress_health_check": checks}
    return settings(**options, max_examples=examples)


def _values(row, columns):
    if isinstance(row, type(pytest.param())):
        assert not row.marks, f"{row.id}: the rows of one test are marked alike"
        return row.values
    return row if columns > 1 else [row]
