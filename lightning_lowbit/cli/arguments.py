"""Arguments of the classes that configurations and a command line name, checked by the sources of these classes.

Values of ``int``, ``float``, ``bool``, ``str``, ``None``, ``Literal``, and unions of these and of tensors, under any
name, are decided by annotations. All other annotations are left to the parser of a run.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_lowbit.checks import choose, is_number, nearest
from lightning_lowbit.cli.configs import as_list
from lightning_lowbit.cli.sources import (
    PACKAGES,
    Expression,
    Module,
    Parameter,
    class_arguments,
    class_names,
    missing_class,
    resolve,
    table_keys,
)

_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_EXAMPLES = {"int": 1, "float": 0.1, "bool": True}

# Arguments of plugins that are names: what one is, and the tables of all, the usual ones first.
PRESETS = "lightning_lowbit.nn.casts.presets.PRESETS"
_DTYPES = [f"lightning_lowbit.precision.run_settings.{name}" for name in ("_SPELLINGS", "_INSTEAD")]
NAMES = {
    "casts": ("preset", [PRESETS]),
    "attention": ("preset", [PRESETS]),
    "compute_dtype": ("compute_dtype", _DTYPES),
    "backend": ("backend", ["lightning_lowbit.nn.layers.native.BACKENDS"]),
    "grouped": ("grouped", ["lightning_lowbit.nn.conversion.convert.GROUPED"]),
    "save": ("save", ["lightning_lowbit.nn.core.saving.SAVES"]),
    "smooth_swiglu": ("kind of smooth_swiglu", ["lightning_lowbit.nn.casts.linear_casts.SMOOTHINGS"]),
    "scaling": ("scaling", ["lightning_lowbit.precision.formats._FP8"]),
}

# Annotations of what classes make, and the modules whose classes the parser may know by short names.
_CLASSES = "Callable|Callback|Scheduler|Optimizer|Lightning(Data)?Module"
SHORT = (
    *("lightning_lowbit", "lightning_lowbit.recipes", "lightning", "pytorch_lightning", "torch.amp", "torch.optim"),
    *("torch.distributed", "transformers.optimization", "transformers.trainer_pt_utils"),
)

_OF_CLASSES = ("class_path", "init_args", "dict_kwargs")

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
    paths = [path for path in classes.values() if re.fullmatch(r"[\w.]+\.[A-Z]\w*", path)]  # and no text.txt
    is_open = any(path.partition(".")[0] not in PACKAGES for path in paths)
    for argument, parameter in values.values():
        path, owner, option, where, value = argument
        is_of_item = path is not None and owner is None
        if _is_file(value) or (is_of_item and argument.place in changed):  # maybe the item that changes
            continue
        if path is None or value not in (None, "null", "~"):  # the parser takes null for more than annotations say
            check_value(option, value, parameter, where)
        if not is_open and isinstance(_read(value), str):
            _check_name(option, value, parameter)
        annotation = "" if parameter.annotation is None else ast.unparse(parameter.annotation)
        takes_class = re.search(_CLASSES, annotation) and not re.search(r"\b(str|Any|Literal)\b", annotation)
        for item in as_list(_read(value)) if takes_class and not is_open else ():
            _check_class(option, item, where)
    for argument in () if is_open else arguments:
        if argument.option.endswith(".class_path"):
            _check_class(argument.option.removesuffix(".class_path"), argument.value, argument.where)


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
    takes_class = isinstance(path, str) and class_arguments(path) is not None
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if takes_class and key not in _OF_CLASSES:
            example = f"{option.rpartition('.')[2]}: {{init_args: {{{key}: …}}}}"
            raise ValueError(f"--{option}.{key}{where}: arguments of a class stand in its init_args. Write {example}.")
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
    value = _read(text)
    key = parts[-1] if parts else ""
    yield from _arguments_in(place, {key: value} if key in ("class_path", "init_args") else value, classes, "")


def _check_name(option: str, value: str, parameter: Parameter) -> None:
    """Raises a ``ValueError`` for a text that is in none of the tables of its parameter."""
    kind, paths = NAMES.get(option.rpartition(".")[2], ("", []))
    is_of_plugin = parameter.module.name.startswith("lightning_lowbit.precision.")
    if not paths or not is_of_plugin:
        return
    tables = [table_keys(path) for path in paths]
    names = {name for table in tables for name in table}
    names |= {"fp8"} if option.endswith("attention") else set()  # "fp8-current" there
    if all(tables) and value.removeprefix("torch.") not in names:
        try:
            choose(kind, value, tables[0])
        except ValueError as error:
            raise ValueError(f"{error} The option is --{option}.") from None


def _check_class(option: str, value: Any, where: str) -> None:
    """Raises a ``ValueError`` for the short name of a class, where none has it."""
    is_short = isinstance(value, str) and re.fullmatch(r"[A-Z]\w*", value)
    if is_short and value not in (names := class_names(*SHORT)):
        raise ValueError(
            f"--{option}{where} takes a class, and there is no {value}.{nearest(value, sorted(names))} Give its path, "
            "such as package.module.Class."
        )


def check_value(option: str, value: Any, parameter: Parameter, where: str = "") -> None:
    """Raises a ``ValueError`` for a value that the annotation of its parameter excludes; ``where`` names the
    configuration that has it, as the end of a sentence."""
    kinds = _kinds_of(parameter)
    if kinds is None or "str" in kinds or any(_fits(value, kind) for kind in kinds):
        return
    names = [kind for kind in kinds if kind in _WORDS]
    literals = [literal for kind in kinds if isinstance(kind, tuple) for literal in kind]
    words = [_WORDS[name] for name in names if not (name == "int" and "float" in names)]
    words += [f"one of {', '.join(map(repr, literals))}"] * bool(literals)
    words += ["null"] * (None in kinds)
    number = _read(value)
    advice = nearest(value, literals)
    if "int" in names and is_number(number) and number % 1 == 0:
        advice = f" Write {int(number)}."
    elif not advice:
        example = next((_EXAMPLES[name] for name in names), next(iter(literals), None))
        advice = f" Give a value such as --{option} {_default(parameter, example)}."
    raise ValueError(f"--{option}{where} takes {' or '.join(words)}; got {value!r}.{advice}")


def _default(parameter: Parameter, example: Any) -> str:
    """Writes an example of a value as configurations do: the default, if there is one."""
    default = None if parameter.default is None else ast.literal_eval(parameter.default)
    value = example if default is None or default == -1 else default
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fits(value: Any, kind: Any) -> bool:
    number = _read(value)
    if isinstance(kind, tuple):
        return value in kind or number in kind
    if kind == "Tensor":  # a word that is no class
        return not (isinstance(number, str) and number.isidentifier() and number.islower())
    if kind is None or kind == "bool":
        return number is None if kind is None else isinstance(number, bool)
    return is_number(number) and (kind == "float" or isinstance(number, int))


def _read(value: Any) -> Any:
    """Reads a text as the parser does, for which ``1e3`` is a number."""
    if not isinstance(value, str):
        return value
    with suppress(yaml.YAMLError):
        value = yaml.safe_load(value)
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    return value


def _is_file(value: Any) -> bool:
    """Tells whether a value may stand for the contents of a file."""
    with suppress(OSError, ValueError):
        return isinstance(value, str) and Path(value).is_file()
    return False


def _kinds_of(parameter: Parameter) -> list[Any] | None:
    """Returns what a parameter takes: names of types, None, and tuples of literals; None if that is not decided."""
    try:
        kinds = [*_kinds(parameter.annotation, parameter.module)]
        default = () if parameter.default is None else (ast.literal_eval(parameter.default),)
    except (ValueError, SyntaxError):
        return None
    kinds += [None] * (default == (None,))
    fits = any(kind == "str" or _fits(value, kind) for value in default for kind in kinds)
    return [*dict.fromkeys(kinds)] if fits or not default else None  # defaults of other types are values, too


def _kinds(annotation: ast.expr | None, module: Module, depth: int = 0) -> Iterator[Any]:
    """Yields the kinds in an annotation; a ``ValueError`` if it has others."""
    match annotation:
        case ast.Constant(value=None):
            yield None
        case ast.Constant(value=str(text)):
            yield from _kinds(ast.parse(text, mode="eval").body, module, depth)
        case ast.Name(id="int" | "float" | "bool" | "str" as name):
            yield name
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _kinds(left, module, depth)
            yield from _kinds(right, module, depth)
        case ast.Subscript(value=generic, slice=inner):
            form = ast.unparse(generic).rpartition(".")[2]
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if form == "Literal":
                yield tuple(ast.literal_eval(item) for item in items)
                return
            if form not in ("Optional", "Union"):
                raise ValueError(form)
            for item in items:
                yield from _kinds(item, module, depth)
            if form == "Optional":
                yield None
        case ast.Name(id="Tensor") | ast.Attribute(attr="Tensor"):
            yield "Tensor"
        case ast.Name() | ast.Attribute():
            definition = resolve(ast.unparse(annotation), module)
            if not isinstance(definition, Expression) or depth > 9:
                raise ValueError(ast.unparse(annotation))
            yield from _kinds(definition.node, definition.module, depth + 1)
        case _:
            raise ValueError("no annotation")
