"""Argument checks, one line where they are used, and what might have been meant."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

_T = TypeVar("_T")


def is_number(value: object) -> bool:
    """Whether an argument is a number, which True and "1" are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def near(given: object, possible: Collection[object], most: int = 1) -> list[str]:
    """Those of some names that may have been meant, the likeliest first.

    A part of a name stands for it: names that begin with it come first, then those that contain it, then those that are
    spelled alike. Names that begin alike keep their order, so that tables list the usual one first.
    """
    choices = {str(choice).lower(): str(choice) for choice in possible}
    word = str(given).lower()
    begin = [name for name in choices if len(word) > 1 and name.startswith(word)]
    contain = [name for name in choices if len(word) > 2 and word in name]
    alike = difflib.get_close_matches(word, choices, n=most)
    return [choices[name] for name in dict.fromkeys([*begin, *contain, *alike])][:most]


def nearest(given: object, possible: Collection[object], most: int = 1) -> str:
    """`` Did you mean 'x'?`` or `` Did you mean 'x' or 'y'?``; nothing where nothing is near."""
    close = near(given, possible, most)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def choose(what: str, given: object, possible: Collection[str]) -> str:
    """Returns ``given`` if it is one of ``possible``, else raises a ``ValueError`` that names the nearest one."""
    if isinstance(given, str) and given in possible:
        return given
    hint = nearest(given, possible)
    raise ValueError(f"Unknown {what} {given!r}.{hint} Choose one of: {', '.join(map(repr, possible))}.")


def from_fields(cls: type[_T], what: str, given: Mapping[str, Any]) -> _T:
    """Builds a dataclass from a mapping, as YAML gives it; an unknown field is an error that names the nearest one."""
    for name in given:
        choose(f"field of {what}", name, [f.name for f in fields(cls) if f.init])  # type: ignore[arg-type]
    return cls(**given)
