"""What the parser has to say about a mistake, in one line that names the nearest thing that would be right."""

import difflib
import inspect
import re
from collections.abc import Collection
from pydoc import locate

from jsonargparse import ArgumentParser

from lightning_lowbit.quant.cast import nearest


def explain(error: BaseException) -> str:
    """The message of an error in one line.

    The parser tries every type that an argument may have and reports each attempt, indented. The first one is that of
    the class which the configuration names; the others are left out. Where a module is missing, nothing else matters.
    """

    def missing(found: re.Match[str]) -> str:
        package = found[2].replace("_", "-")  # as PyPI writes names
        return f"{found[1]}, which the configuration names: install its package ({package}), or mend the name."

    lines = [line for line in str(error).splitlines() if line.strip()]
    message = re.sub(r"\s+", " ", _first_cause(lines)).strip() or type(error).__name__
    return re.sub(r"Parser key.*(No module named '(\w+)').*", missing, message)


def suggest(message: str, keys: Collection[str]) -> str:
    """What might have been meant where a message is about an unknown key or class; empty otherwise.

    Args:
        message: of the parser, from :func:`explain`.
        keys: what may stand on the command line.
    """
    no_class = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message)
    if no_class is not None:
        return nearest(no_class[2], dir(locate(no_class[1]))).strip()
    misspelt = re.search(r"(?:Option '|accept option '|unrecognized arguments: -*)([\w.]+)", message)
    if misspelt is None:
        return ""
    named = re.findall(r"class_path[ =]'([\w.]+)'", message)
    if named:
        keys = arguments_of(named[-1]) or set()
    close = [
        match for word in (misspelt[1], misspelt[1].split(".")[0]) for match in difflib.get_close_matches(word, keys)
    ]
    return f"Did you mean {close[0]!r}?" if close else "`lowbit fit --help` lists what is possible."


def _first_cause(lines: list[str]) -> str:
    starts = [i for i, line in enumerate(lines) if line.strip() == "Errors:"]
    if not starts:
        return " ".join(lines)
    where = [line for line in lines[: starts[0]] if line.strip().endswith(":")]
    bullet, *others = lines[starts[0] + 1 :]
    indent = len(bullet) - len(bullet.lstrip())
    ends = [i for i, line in enumerate(others) if len(line) - len(line.lstrip()) <= indent]
    block = [bullet.replace("- ", "", 1), *others[: ends[0] if ends else None]]
    given = [line for line in others if "Given value:" in line and "Expected" in block[0]]
    return " ".join([*where, _first_cause(block), *given[:1]])


def arguments_of(class_path: str) -> set[str] | None:
    """Names of the arguments that a class takes, those that it passes on to its bases included; None if unknown."""
    cls = locate(class_path)
    if not inspect.isclass(cls):
        return None
    try:
        return set(ArgumentParser().add_class_arguments(cls, fail_untyped=False))
    except ValueError:  # of classes written in C
        return set()
