"""Arguments of the classes that configurations and a command line name, checked by the sources of these classes."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from lightning_lowbit.checks import nearest
from lightning_lowbit.cli.sources import class_arguments, missing_class


class _Argument(NamedTuple):
    """An argument of a class, as a configuration or the command line gives it.

    Attributes:
        path: of the class; None where nothing names one.
        owner: the option whose value the class is; None for an item of a list.
        option: of the argument.
        where: the end of a sentence about it.
    """

    path: str | None
    owner: str | None
    option: str
    where: str


def check_classes(configs: Mapping[str, Mapping[str, Any]], options: Mapping[str, str | None]) -> None:
    """Raises a ``ValueError`` for a class that does not exist, and for an argument that a class does not take."""
    classes: dict[str, str] = {}  # paths by option, as far as the arguments are read
    arguments: list[_Argument] = []
    for name, config in configs.items():
        for key, value in config.items():
            arguments += _arguments_in(key, value, classes, f" in {name}")
    for option, text in options.items():
        arguments += _arguments_of_option(option, text, classes)
    for path, owner, option, where in arguments:
        known = None if path is None else class_arguments(path)
        name = option.rpartition(".")[2]
        # Of a class that a later configuration replaces, the new one gets the arguments that it takes.
        if path is None or known is None or name in known or (owner is not None and classes.get(owner) != path):
            continue
        takes = f"{path.rpartition('.')[2]} takes {', '.join(sorted(known)) or 'none'}."
        raise ValueError(f"There is no option --{option}{where}.{nearest(name, sorted(known))} {takes}")


def _arguments_in(
    option: str, value: Any, classes: dict[str, str], where: str, is_item: bool = False
) -> Iterator[_Argument]:
    """Notes the class in the value of an option, and finds its arguments and theirs."""
    if isinstance(value, list):
        for item in value:  # options after a list are of its last item
            yield from _arguments_in(option, item, classes, where, is_item=True)
        return
    inherited = None if is_item else classes.get(option)
    path = value.get("class_path", inherited) if isinstance(value, Mapping) else value
    if path != classes.get(option):
        for name in [name for name in classes if f"{name}.".startswith(f"{option}.")]:
            del classes[name]
    if isinstance(path, str) and "." in path:
        classes[option] = path
        module, _, name = path.rpartition(".")
        if name[:1].isupper() and (names := missing_class(path)) is not None:
            raise ValueError(f"--{option}{where}: {module} has no {name}.{nearest(name, names)}")
    for key, item in value.items() if isinstance(value, Mapping) else ():
        for argument in item if key == "init_args" and isinstance(item, Mapping) else ():
            if "." not in str(argument):
                yield _Argument(classes.get(option), None if is_item else option, f"{option}.{key}.{argument}", where)
        yield from _arguments_in(f"{option}.{key}", item, classes, where, is_item)


def _arguments_of_option(option: str, text: str | None, classes: dict[str, str]) -> Iterator[_Argument]:
    place, *parts = option.split(".")
    for i, part in enumerate(parts):
        if part in ("dict_kwargs", "help"):
            return
        if part in ("class_path", "init_args"):
            continue
        path = classes.get(place)
        yield _Argument(path, place, ".".join(option.split(".")[: i + 2]), "")
        place = f"{place}.{part}" if path is None else f"{place}.init_args.{part}"
    try:
        value = None if text is None else yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    key = parts[-1] if parts else ""
    yield from _arguments_in(place, {key: value} if key in ("class_path", "init_args") else value, classes, "")
