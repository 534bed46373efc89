"""Argument checks in one line, which return what they accept, or raise a ``ValueError`` that suggests what was meant.

self.every = integer("every", every, 1, "a number of optimizer steps")
# every is a number of optimizer steps, 1 or more; got 0.
"""

import difflib
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

_T = TypeVar("_T")


def is_number(value: object) -> bool:
    """Whether an argument is a number; True and "1" are not."""
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
    """An ``int`` (not a bool) within bounds, or None if ``or_none``; ``what`` says in words what it counts."""
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
    """A number (not a bool, not NaN) within bounds, or None if ``or_none``; ``what`` says in words what it means."""
    limits = {"above": above, "at_least": at_least, "below": below, "at_most": at_most}
    is_valid = is_number(value) and (abs(value) < math.inf or (not finite and value == value))  # type: ignore[arg-type]
    return _checked(name, value, is_valid, what, or_none, limits)


def positive(name: str, value: _T, what: str = "a number", *, or_none: bool = False) -> _T:
    """A finite number above 0."""
    return number(name, value, what, above=0, or_none=or_none)


def fraction(name: str, value: _T, what: str = "a fraction", *, or_none: bool = False) -> _T:
    """A number above 0 and at most 1."""
    return number(name, value, what, above=0, at_most=1, or_none=or_none)


def flag(name: str, value: _T, what: str = "true or false") -> _T:
    """True or False; ``what`` says what else there is."""
    return _checked(name, value, isinstance(value, bool), what, False, {})


# How a limit is compared and said.
_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "above": (operator.gt, "above {}"),
    "at_least": (operator.ge, "{} or more"),
    "below": (operator.lt, "below {}"),
    "at_most": (operator.le, "at most {}"),
}


def text(name: str, value: _T, what: str = "a text") -> _T:
    """A ``str`` that is not empty."""
    return _checked(name, value, isinstance(value, str) and value != "", what, False, {})


def _checked(name: str, value: _T, is_valid: bool, what: str, or_none: bool, limits: Mapping[str, float | None]) -> _T:
    given = {kind: limit for kind, limit in limits.items() if limit is not None}
    if (or_none and value is None) or (is_valid and all(_LIMITS[kind][0](value, given[kind]) for kind in given)):
        return value
    bounds = " and ".join(_LIMITS[kind][1].format(limit) for kind, limit in given.items())
    needed = ", ".join(filter(None, (what, bounds, "or None" if or_none else "")))
    raise ValueError(f"{name} is {needed}; got {value!r}.")


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few names, and how many more there are: ``a, b, c and 4 more``."""
    every = [*names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def near(given: object, possible: Collection[object], most: int = 1) -> list[str]:
    """The possible names that ``given`` may stand for, the likeliest first.

    Names that begin with it come first, then those that contain it, then those of similar spelling. Ties keep their
    order, so that tables list the usual name first.
    """
    choices = {str(choice).lower(): str(choice) for choice in possible}
    word = str(given).lower()
    begin = [name for name in choices if len(word) > 1 and name.startswith(word)]
    contain = [name for name in choices if len(word) > 2 and word in name]
    alike = difflib.get_close_matches(word, choices, n=most)
    return [choices[name] for name in dict.fromkeys([*begin, *contain, *alike])][:most]


def nearest(given: object, possible: Collection[object], most: int = 1) -> str:
    """`` Did you mean 'x'?`` or `` Did you mean 'x' or 'y'?``; empty where nothing is near."""
    close = near(given, possible, most)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def choose(what: str, given: object, possible: Collection[str]) -> str:
    """Returns ``given`` if it is one of ``possible``, else raises a ``ValueError`` that names the nearest one."""
    if isinstance(given, str) and given in possible:
        return given
    hint = nearest(given, possible)
    raise ValueError(f"Unknown {what} {given!r}.{hint} Choose one of: {', '.join(map(repr, possible))}.")


def from_fields(cls: type[_T], what: str, given: Mapping[str, Any]) -> _T:
    """Builds a dataclass from a mapping as YAML gives it; an unknown field is an error that names the nearest one."""
    for name in given:
        choose(f"field of {what}", name, [f.name for f in fields(cls) if f.init])  # type: ignore[arg-type]
    return cls(**given)
