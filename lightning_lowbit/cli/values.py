"""Values of arguments, checked by the annotations in the sources of what takes them.

Decided are ``int``, ``float``, ``bool``, ``str``, ``None``, ``Literal``, and unions of these and of tensors, under any
name. All other annotations are left to the parser of a run.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lightning_lowbit.checks import choose, is_number, nearest
from lightning_lowbit.cli.sources import Expression, Module, Parameter, class_names, resolve, table_keys

_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_EXAMPLES = {"int": 1, "float": 0.1, "bool": True}

# Arguments of plugins that are names: what one is, and the tables of all, the usual ones first.
PRESETS = "lightning_lowbit.nn.casts.presets.PRESETS"
_DTYPES = [f"lightning_lowbit.precision.run_settings.{name}" for name in ("COMPUTE_DTYPES", "_SPELLINGS", "_INSTEAD")]
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


def check_name(option: str, value: Any, parameter: Parameter) -> None:
    """Raises a ``ValueError`` for a text that is in none of the tables of its parameter."""
    kind, paths = NAMES.get(option.rpartition(".")[2], ("", []))
    is_of_plugin = parameter.module.name.startswith("lightning_lowbit.precision.")
    if not paths or not is_of_plugin or not isinstance(_read(value), str) or _is_file(value):
        return
    tables = [table_keys(path) for path in paths]
    names = {name for table in tables for name in table}
    names |= {"fp8"} if option.endswith("attention") else set()  # "fp8-current" there
    if all(tables) and str(value).removeprefix("torch.") not in names:
        try:
            choose(kind, value, tables[0])
        except ValueError as error:
            raise ValueError(f"{error} The option is --{option}.") from None


def check_class(option: str, value: Any, parameter: Parameter) -> None:
    """Raises a ``ValueError`` for the short name of a class, where none has it and no other text is possible."""
    annotation = "" if parameter.annotation is None else ast.unparse(parameter.annotation)
    takes_class = re.search(_CLASSES, annotation) and not re.search(r"\b(str|Any|Literal)\b", annotation)
    if not takes_class or not re.fullmatch(r"[A-Z]\w*", str(value)) or _is_file(value):
        return
    names = class_names(*SHORT)
    if value not in names and isinstance(_read(value), str):
        raise ValueError(
            f"--{option} takes a class, and there is no {value}.{nearest(value, sorted(names))} Give its path, such as "
            "package.module.Class."
        )


def check_value(option: str, value: Any, parameter: Parameter, where: str = "") -> None:
    """Raises a ``ValueError`` for a value that the annotation of its parameter excludes.

    Args:
        option: its name, without hyphens.
        value: as a configuration or the command line gives it.
        parameter: that gets it.
        where: the configuration, as part of a sentence.
    """
    kinds = _kinds_of(parameter)
    if kinds is None or "str" in kinds or any(_fits(value, kind) for kind in kinds) or _is_file(value):
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
