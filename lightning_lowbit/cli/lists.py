"""Accepts a single item for arguments of classes that take a list: ``skip lm_head`` means ``skip: [lm_head]``."""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from pydoc import ErrorDuringImport, locate
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml


def with_lists(config: Any) -> Any:
    if isinstance(config, list):
        return [with_lists(item) for item in config]
    if not isinstance(config, Mapping):
        return config
    result = {key: with_lists(value) for key, value in config.items()}
    if isinstance(arguments := result.get("init_args"), dict):
        cls = class_at(result.get("class_path"))
        result["init_args"] = {key: [value] if _is_item(value, cls, key) else value for key, value in arguments.items()}
    return result


def options_with_lists(arguments: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """Does the same for a command line whose options change ``config``."""
    result = list(arguments)
    named: dict[str, str] = {}  # class paths by option
    for i, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or (not equals and (i + 1 == len(arguments) or result[i + 1].startswith("--"))):
            continue
        value = value if equals else result[i + 1]
        key = option.removeprefix("--").removesuffix("+").removesuffix(".class_path")
        named[key] = value
        owner, _, name = key.rpartition(".")
        owner = owner.removesuffix(".init_args")
        try:
            item = yaml.safe_load(value)
        except yaml.YAMLError:
            item = value
        if not option.endswith("+") and _is_item(item, class_at(named.get(owner) or _class_path(config, owner)), name):
            value = yaml.safe_dump([item], default_flow_style=True, width=10**9).strip()
            result[i if equals else i + 1] = f"{option}={value}" if equals else value
    return result


def _class_path(config: Any, path: str) -> Any:
    for part in path.split("."):
        within = config.get("init_args") if isinstance(config, Mapping) and part not in config else config
        config = within.get(part) if isinstance(within, Mapping) else None
        config = config[-1] if isinstance(config, list) and config else config
    return config.get("class_path") if isinstance(config, Mapping) else config


def class_at(path: Any) -> Any:
    """Returns the class with a path, or a name in this package; None if it cannot be imported."""
    try:
        cls = locate(str(path)) or locate(f"lightning_lowbit.{path}")
    except ErrorDuringImport:
        return None
    return cls if inspect.isclass(cls) else None


def _is_item(value: Any, cls: Any, argument: str) -> bool:
    if cls is None or not isinstance(value, str | int | float):
        return False
    try:
        owner = next(base for base in cls.__mro__ if argument in inspect.signature(base.__init__).parameters)
        hint = get_type_hints(owner.__init__)[argument]
    except (StopIteration, NameError, KeyError, ValueError):  # no such argument, or no type
        return False
    possible = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return not {Any, str, int, float} & set(possible) and any(
        get_origin(kind) in (list, Iterable, Sequence, Collection) for kind in possible
    )
