"""Arguments of the classes that configurations and a command line name, checked by the sources of these classes."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from lightning_lowbit.checks import nearest
from lightning_lowbit.cli.sources import PACKAGES, Parameter, class_arguments, missing_class
from lightning_lowbit.cli.values import check_class, check_name, check_value

_UNKNOWN: Any = object()  # the value of an argument of which only a part is given


class _Argument(NamedTuple):
    """An argument of a class or of the Trainer, as a configuration or the command line gives it."""

    path: str | None  # of the class; None where nothing names one
    owner: str | None  # the option whose value the class is; None for an item of a list
    option: str
    where: str  # the end of a sentence about it
    value: Any = _UNKNOWN  # as it is written

    @property
    def place(self) -> str:
        """The option as short as it can be written."""
        return self.option.replace(".init_args", "")


def check_classes(
    configs: Mapping[str, Mapping[str, Any]], options: Mapping[str, str | None], parameters: Mapping[str, Parameter]
) -> None:
    """Raises a ``ValueError`` for a class that does not exist, for an argument that a class does not take, and for a
    value that an argument does not take: in contents of configurations by name, and in texts of the command line by
    names without hyphens. ``parameters`` are of options that belong to no class, such as ``trainer.max_steps``."""
    classes: dict[str, str] = {}  # paths by option, as far as the arguments are read
    arguments: list[_Argument] = []
    for name, config in configs.items():
        for key, value in config.items():
            arguments.append(_Argument(None, None, key, f" in {name}", value))
            arguments += _arguments_in(key, value, classes, f" in {name}")
    for option, text in options.items():
        arguments += _arguments_of_option(option, text, classes)
    values: dict[str, tuple[_Argument, Parameter]] = {}  # those in force, by place
    for number, argument in enumerate(arguments):
        path, owner, option, where, value = argument
        known = parameters if path is None else class_arguments(path)
        # Of a class that a later configuration replaces, the new one gets the arguments that it takes.
        if known is None or (owner is not None and classes.get(owner) != path):
            continue
        name = option if path is None else option.rpartition(".")[2]
        if path is not None and name not in known:
            takes = f"{path.rpartition('.')[2]} takes {', '.join(sorted(known)) or 'none'}."
            raise ValueError(f"There is no option --{option}{where}.{nearest(name, sorted(known))} {takes}")
        goes_on = value is _UNKNOWN or isinstance(value, Mapping) or (isinstance(value, list) and value[:1] != [None])
        if not goes_on:  # what came before is replaced as a whole
            values = {place: entry for place, entry in values.items() if not place.startswith(f"{argument.place}.")}
        if name in known and value is not _UNKNOWN:
            is_item = path is not None and owner is None
            values[f"{argument.place}#{number}" if is_item else argument.place] = argument, known[name]
    changed = {_Argument(None, None, option, "").place for option in options}
    # Other packages may add presets and short names.
    is_open = any(path.partition(".")[0] not in PACKAGES for path in classes.values())
    for argument, parameter in values.values():
        path, owner, option, where, value = argument
        if path is not None and owner is None and argument.place in changed:  # of an item, maybe the one that changes
            continue
        if path is None or value not in (None, "null", "~"):  # the parser takes null for more than annotations say
            check_value(option, value, parameter, where)
        if not is_open:
            check_name(option, value, parameter)
            check_class(option, value, parameter)


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
        yield _Argument(None, None, f"{option}.{key}", where, item)
        for argument in item if key == "init_args" and isinstance(item, Mapping) else ():
            if "." not in str(argument):
                owner, name = None if is_item else option, f"{option}.{key}.{argument}"
                yield _Argument(classes.get(option), owner, name, where, item[argument])
        yield from _arguments_in(f"{option}.{key}", item, classes, where, is_item)


def _arguments_of_option(option: str, text: str | None, classes: dict[str, str]) -> Iterator[_Argument]:
    place, *parts = option.split(".")
    if not parts:
        yield _Argument(None, None, option, "", text)
    for i, part in enumerate(parts):
        if part in ("dict_kwargs", "help"):
            return
        if part in ("class_path", "init_args"):
            continue
        path = classes.get(place)
        value = text if i + 1 == len(parts) else _UNKNOWN
        yield _Argument(path, place, ".".join(option.split(".")[: i + 2]), "", value)
        place = f"{place}.{part}" if path is None else f"{place}.init_args.{part}"
    try:
        value = None if text is None else yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    key = parts[-1] if parts else ""
    yield from _arguments_in(place, {key: value} if key in ("class_path", "init_args") else value, classes, "")
