"""Patterns that select layers, parameters and weights by name.

A pattern is a regular expression that full-matches a module's name, or the rest behind a dot: ``lm_head`` matches
``model.lm_head``. A pattern that matches a module holds for all layers inside it: ``layers\\.0`` stands for the whole
first block. Numbers count from the end, too: ``layers\\.-1`` is the last one.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product

from lightning_lowbit.checks import some

_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module", "_products")


def clean_name(name: str) -> str:
    """Returns a module's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def checked_patterns(argument: str, patterns: Iterable[str]) -> list[str]:
    """Returns the patterns of an argument; raises a ``ValueError`` if they are no list of regular expressions."""
    if isinstance(patterns, str):
        raise ValueError(f"{argument} is a list of patterns; got the string {patterns!r}. Write [{patterns!r}].")
    if not isinstance(patterns, Iterable):
        raise ValueError(f"{argument} is a list of patterns, [] for none; got {patterns!r}.")
    patterns = list(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"{argument}: a pattern is a string, such as 'lm_head'; got {pattern!r}.")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{argument}: {pattern!r} is not a regular expression ({error}).") from None
    return patterns


def select(
    names: Sequence[str],
    patterns: Iterable[str],
    argument: str,
    kind: str = "linear layer",
    left: Callable[[], Mapping[str, str]] = dict,
) -> set[str]:
    """Selects the names that any of the patterns matches; raises a ``ValueError`` for one that matches none.

    An attribute ``others`` of ``names`` may have further names of each, which are matched, too. Errors name the
    ``argument`` that has the patterns, the ``kind`` of layers, and what ``left`` returns of modules that cannot be
    selected, by name.
    """
    selected: set[str] = set()
    for pattern in checked_patterns(argument, patterns):
        compiled = re.compile(pattern)
        matched = matching(compiled, names)
        if not matched:
            others = left()
            for name in matching(compiled, [*others]):
                raise ValueError(f"{argument}: the pattern {pattern!r} matches {name}, {others[name]}.")
            advice = f"There are {len(names)}, e.g. {some(map(clean_name, names))}. {_advice(pattern, names)}"
            raise ValueError(f"{argument}: the pattern {pattern!r} matches no {kind}. {advice}")
        selected.update(matched)
    return selected


def select_by_name(names: Sequence[str], pattern: str) -> set[str]:
    """Returns the names that a valid pattern matches to their end: a layer itself, not only a module around it."""
    compiled, called = re.compile(pattern), _spellings(pattern, names)
    tails = {name: [path[i:] for path in paths for i in range(len(path))] for name, paths in called.items()}
    return {name for name in names if any(compiled.fullmatch(".".join(tail)) for tail in tails[name])}


def _advice(pattern: str, names: Sequence[str]) -> str:
    """Advises how to write a pattern that matched nothing, such as ``lora_``, a piece of ``lora_A``."""
    rule = "A pattern must match one or more whole parts of a name, as they stand between dots"
    pieces = {piece for name in names for piece in clean_name(name).split(".")}
    for wider in (f"{pattern}.*", f".*{pattern}", f".*{pattern}.*"):
        if matches := sorted(piece for piece in pieces if re.fullmatch(wider, piece)):
            return f"{rule}: {wider!r} matches {', '.join(matches[:3])}."
    return f"{rule}, such as {names[0].rpartition('.')[2]!r}." if names else f"{rule}."


# A negative number in a pattern, which is not the rest of a range such as [0-9].
_NEGATIVE = re.compile(r"(?<![\w\]])-\d")


def _spellings(pattern: str, names: Sequence[str]) -> dict[str, list[list[str]]]:
    """Returns all names of each layer, as parts; for patterns with negative numbers, also numbered from the end."""
    others: Mapping[str, list[str]] = getattr(names, "others", {})
    paths = {name: [clean_name(path).split(".") for path in (name, *others.get(name, ()))] for name in names}
    if not _NEGATIVE.search(pattern):
        return paths
    lengths: dict[tuple[str, ...], int] = {}
    for path in chain.from_iterable(paths.values()):
        for i, part in enumerate(path):
            if part.isdigit():
                lengths[tuple(path[:i])] = max(lengths.get(tuple(path[:i]), 0), int(part) + 1)

    def spell(path: Sequence[str]) -> list[list[str]]:
        numbers = {i: int(part) - lengths[tuple(path[:i])] for i, part in enumerate(path) if part.isdigit()}
        choices = [(part, str(numbers[i])) if i in numbers else (part,) for i, part in enumerate(path)]
        return [*map(list, product(*choices))]

    return {name: [spelling for path in spelled for spelling in spell(path)] for name, spelled in paths.items()}


def matching(pattern: re.Pattern[str] | str, names: Sequence[str]) -> list[str]:
    """Returns the names that a valid pattern matches; see the top of this file."""
    pattern = re.compile(pattern)

    def matches(parts: Sequence[str]) -> bool:
        ends = range(1, len(parts) + 1)  # the layer and the modules around it
        return any(pattern.fullmatch(".".join(parts[start:end])) for end in ends for start in range(end))

    return [name for name, paths in _spellings(pattern.pattern, names).items() if any(map(matches, paths))]
