"""Argument checks in one line: each returns a valid argument, or raises a ``ValueError`` that suggests one.

    self.every = integer("every", every, 1, "a number of optimizer steps")
    # every is a number of optimizer steps, 1 or more; got 0.

``name`` is the argument's, ``what`` its meaning in words; ``or_none`` also accepts None. Other arguments are bounds.
"""

import difflib
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

_T = TypeVar("_T")


def is_number(value: object) -> bool:
    """Returns whether an argument is a number; True and "1" are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def integer(
    name: str,
    value: _T,
    at_least: int | None = None,
    what: str = "a whole number",
    *,
    at_most: int | None = None,
    or_none: bool = False,
) -> _T:
    """Accepts an ``int`` (no bool) within bounds."""
    return _checked(name, value, type(value) is int, what, or_none, {"at_least": at_least, "at_most": at_most})


def number(
    name: str,
    value: _T,
    what: str = "a number",
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    finite: bool = True,
    or_none: bool = False,
) -> _T:
    """Accepts a number (no bool, no NaN) within bounds; infinity unless ``finite``."""
    limits = {"above": above, "at_least": at_least, "below": below, "at_most": at_most}
    is_valid = is_number(value) and (abs(value) < math.inf or (not finite and value == value))  # type: ignore[arg-type]
    return _checked(name, value, is_valid, what, or_none, limits)


def positive(name: str, value: _T, what: str = "a number", *, or_none: bool = False) -> _T:
    """Accepts a finite number above 0."""
    return number(name, value, what, above=0, or_none=or_none)


def fraction(name: str, value: _T, what: str = "a fraction", *, or_none: bool = False) -> _T:
    """Accepts a number above 0 and at most 1."""
    return number(name, value, what, above=0, at_most=1, or_none=or_none)


def flag(name: str, value: _T, what: str = "true or false") -> _T:
    return _checked(name, value, isinstance(value, bool), what, False, {})


# How a limit is compared and said.
_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "above": (operator.gt, "above {}"),
    "at_least": (operator.ge, "{} or more"),
    "below": (operator.lt, "below {}"),
    "at_most": (operator.le, "at most {}"),
}


def text(name: str, value: _T, what: str = "a text") -> _T:
    """Accepts a ``str`` that is not empty."""
    return _checked(name, value, isinstance(value, str) and value != "", what, False, {})


def _checked(name: str, value: _T, is_valid: bool, what: str, or_none: bool, limits: Mapping[str, float | None]) -> _T:
    bounds = {kind: limit for kind, limit in limits.items() if limit is not None}
    if (or_none and value is None) or (is_valid and all(_LIMITS[kind][0](value, bounds[kind]) for kind in bounds)):
        return value
    within = " and ".join(_LIMITS[kind][1].format(limit) for kind, limit in bounds.items())
    needed = ", ".join(filter(None, (what, within, "or None" if or_none else "")))
    raise ValueError(f"{name} is {needed}; got {value!r}.")


def some(names: Iterable[str], most: int = 3) -> str:
    """Returns the first few names, and how many more there are: ``a, b, c and 4 more``."""
    every = [*names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def near(value: object, possible: Collection[object], most: int = 1) -> list[str]:
    """Returns the possible names that a value may stand for, the likeliest first.

    Names that begin with it come first, then those that contain it, then those of similar spelling. Ties keep their
    order, so that tables list the usual name first.
    """
    choices = {str(choice).lower(): str(choice) for choice in possible}
    word = str(value).lower()
    begin = [name for name in choices if len(word) > 1 and name.startswith(word)]
    contain = [name for name in choices if len(word) > 2 and word in name]
    alike = difflib.get_close_matches(word, choices, n=most)
    return [choices[name] for name in dict.fromkeys([*begin, *contain, *alike])][:most]


def nearest(value: object, possible: Collection[object], most: int = 1) -> str:
    """Returns `` Did you mean 'x'?`` or `` Did you mean 'x' or 'y'?``; empty where nothing is near."""
    close = near(value, possible, most)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def choose(what: str, value: object, possible: Collection[str]) -> str:
    """Returns a value that is one of ``possible``, else raises a ``ValueError`` that names the nearest one."""
    if isinstance(value, str) and value in possible:
        return value
    hint = nearest(value, possible)
    raise ValueError(f"Unknown {what} {value!r}.{hint} Choose one of: {', '.join(map(repr, possible))}.")


def from_fields(cls: type[_T], what: str, values: Mapping[str, Any]) -> _T:
    """Builds a dataclass from a mapping as YAML gives it; an unknown field is an error that names the nearest one."""
    for name in values:
        choose(f"field of {what}", name, [f.name for f in fields(cls) if f.init])  # type: ignore[arg-type]
    return cls(**values)
