"""Shortens messages of the parser to one line, with the nearest valid name."""

import difflib
import errno
import inspect
import os
import re
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from traceback import walk_tb
from typing import Any

from lightning_lowbit.checks import near, nearest
from lightning_lowbit.packages import install_extra

_FROM_RUST = re.compile(r"\(os error (\d+)\)")  # in messages of safetensors and tokenizers


def explain(error: BaseException) -> str:
    """Shortens the message of an error to one line; of the parser's attempts for each type, only one stays: the
    first with a class, or the first."""

    def missing(match: re.Match[str]) -> str:
        package = install_extra(match[2]) or match[2].replace("_", "-")  # as PyPI writes names
        return f"{match[1]}, which the configuration names: install its package ({package}), or mend the name."

    lines = [line for line in str(error).splitlines() if line.strip()]
    message = re.sub(r"\s+", " ", _first_cause(lines)).strip() or type(error).__name__
    message = re.sub(r"Parser key.*(No module named '(\w+)').*", missing, message)
    advice = remedy(error)
    message = f"{message.rstrip('.')}. {advice}" if advice else message
    return " ".join([message, *getattr(error, "__notes__", ())])


# By the number of the system's error.
_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Give another path, or change the permissions there."),
    **dict.fromkeys((errno.EDQUOT, errno.ENOSPC), "Make room there, or give a path on another disk."),
    errno.EBUSY: "It is in use: give another path.",
    errno.EEXIST: "Give another path, or remove what is there.",
    errno.EISDIR: "It is a folder: give a file.",
    errno.ELOOP: "Its links lead in a circle: give another path.",
    errno.EMFILE: "Allow more open files: ulimit -n 4096.",
    errno.ENAMETOOLONG: "Give a shorter name.",
    errno.ENOENT: "Give a path that exists.",
    errno.ENOTDIR: "A part of the path is a file and no folder: give another path.",
    errno.ENOTEMPTY: "Give another path, or empty the folder.",
    errno.EROFS: "Nothing can be written there: give another path.",
}


# Messages of libraries that do not raise an ``OSError`` with its number.
_MESSAGES = {
    r"^Symlink loop": _REMEDIES[errno.ELOOP],
    r"^No such file or directory": _REMEDIES[errno.ENOENT],
    r"^Could not determine home": "Give the path without '~'.",
    r"^embedded null byte|surrogates not allowed$": "Give a path of other characters.",
}


def remedy(error: BaseException) -> str:
    """Returns advice for a path or file that the system refuses; empty for other errors, whose messages have it."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (in_rust := _FROM_RUST.search(str(error))) is not None:
        number = int(in_rust[1])
    advices = (advice for text, advice in _MESSAGES.items() if re.search(text, str(error)))
    return _REMEDIES.get(number or 0) or next(advices, "")


def is_of_a_path(error: Exception) -> bool:
    """Tells whether pathlib or a library in Rust could not use a path; their exceptions are no ``OSError``."""
    is_pathlib = isinstance(error, RuntimeError) and re.match("Symlink loop|Could not determine home", str(error))
    return bool(is_pathlib) or _FROM_RUST.search(str(error)) is not None


def lost_process(error: Exception) -> str:
    """Returns a message if gloo has lost another process of the run, whose own message is the cause; else ""."""
    lost = re.search(r"gloo/transport/\S*\] (.+?)(?=\.?$|\. )", str(error))
    return f"Another process of this run ended or hangs; its messages, if any, tell. Here: {lost[1]}." if lost else ""


def suggest(message: str, keys: Collection[str]) -> str:
    """Returns a hint for a message about an unknown key or class, from the valid ``keys``; empty for other messages."""
    no_class = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message)
    if no_class is not None:
        return nearest(no_class[2], dir(locate(no_class[1]))).strip()
    unknown = re.search(r"(?:Option '|accept option '|unrecognized arguments: -*)([\w.]+)", message)
    if unknown is None:
        return ""
    named = re.findall(r"class_path[ =]'([\w.]+)'", message)
    if named:
        keys = arguments_of(named[-1]) or set()
    close = near(unknown[1], sorted(keys)) or difflib.get_close_matches(unknown[1].split(".")[0], keys)
    hyphens = "--" if message.startswith("unrecognized") and not named else ""
    return f"Did you mean {hyphens + close[0]!r}?" if close else "`lowbit fit --help all` lists what is possible."


def hidden(message: str) -> str:
    """Returns a hint if a message names a module that both an installed file and one of the current folder have."""
    words = re.findall(r"'([A-Za-z_]\w*)[\w.]*'", message) if re.search("module|import|class", message) else []
    for name in dict.fromkeys(words):
        local = next((path for path in (f"{name}.py", name) if os.path.exists(path)), None)
        taken = None
        with suppress(ImportError, ValueError):  # a module without a place
            taken = find_spec(name) if local is not None else None
        if taken is not None and taken.origin is not None and not Path(taken.origin).is_relative_to(Path.cwd()):
            return f" {name} is {taken.origin}, which is installed, and not ./{local}: give that another name."
    return ""


def option_of(error: BaseException, config: Mapping[str, Any]) -> str | None:
    """Finds the option of an error, or of its cause, that begins with an argument of the object that raised it."""
    name = re.split(r"\W", str(error), maxsplit=1)[0]
    raisers = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    for path, owner in _arguments(config):
        if path.rpartition(".")[2] == name:
            cls = class_at(owner)
            if cls is not None and any(isinstance(raiser, cls) for raiser in raisers):
                return f"--{path}"
    cause = error.__cause__ or error.__context__
    return None if cause is None else option_of(cause, config)


def _arguments(config: Mapping[str, Any], prefix: str = "", owner: Any = None) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key != "class_path":
            yield prefix + key, owner
        if isinstance(value, Mapping):
            yield from _arguments(value, f"{prefix}{key}.", value.get("class_path", owner))


def _first_cause(lines: list[str]) -> str:
    starts = [i for i, line in enumerate(lines) if line.strip() == "Errors:"]
    if not starts:
        return " ".join(lines)
    where = [line for line in lines[: starts[0]] if line.strip().endswith(":")]
    causes = lines[starts[0] + 1 :]
    indents = [len(line) - len(line.lstrip()) for line in causes]
    heads = [i for i, indent in enumerate(indents) if indent <= indents[0]]
    blocks = [causes[i:end] for i, end in zip(heads, [*heads[1:], None], strict=True)]
    block = next((block for block in blocks if "Problem with given class_path" in block[0]), blocks[0])  # got furthest
    block = [block[0].replace("- ", "", 1), *block[1:]]
    lacks_value = "Expected" in block[0] and "import path" not in block[0]  # that names what is no path
    values = [line for line in causes if "Given value:" in line and lacks_value]
    return " ".join([*where, _first_cause(block), *values[:1]])


def class_at(path: Any) -> Any:
    """Returns the class with a path, or a name in this package; None if it cannot be imported."""
    try:
        cls = locate(str(path)) or locate(f"lightning_lowbit.{path}")
    except ErrorDuringImport:
        return None
    return cls if inspect.isclass(cls) else None


def arguments_of(class_path: str) -> Set[str] | None:
    cls = class_at(class_path)
    return None if cls is None else _taken_by(cls)


@cache
def _taken_by(cls: type) -> frozenset[str]:
    from jsonargparse import ArgumentParser  # slow to import, and `lowbit ls` needs none

    try:
        return frozenset(ArgumentParser().add_class_arguments(cls, fail_untyped=False))
    except ValueError:  # a class written in C
        return frozenset()
