"""Classes as their sources define them: names and arguments, without importing what they are made of.

A name is followed from module to module by the import statements, and ``**kwargs`` to the base classes that get them.
What the sources leave open (a decorator, a class that another function makes) is no mistake: the answer is None.
"""

import ast
import re
import sys
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_OWN = "lightning_lowbit"
PACKAGES = {_OWN, "lightning", "pytorch_lightning", "torch"}
_OPEN = re.compile(r"\b(__getattr__|globals|locals|setattr|sys\.modules|exec)\b")  # ways to names that none sees


class Module(NamedTuple):
    """A module's source."""

    name: str  # with its packages
    package: str  # that relative imports begin at
    tree: ast.Module


class Class(NamedTuple):
    """A class's definition, and the module that holds it."""

    node: ast.ClassDef
    module: Module


class Expression(NamedTuple):
    """What a module assigns to a name."""

    node: ast.expr
    module: Module


class Parameter(NamedTuple):
    """A parameter of a method; the annotation and the default are None if it has none."""

    annotation: ast.expr | None
    default: ast.expr | None
    module: Module  # that holds the method


@cache
def read_module(name: str) -> Module | None:
    """Reads the source of a module; None if there is none, or Python cannot read it."""
    path = _find(name)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    return Module(name, name if path.name == "__init__.py" else name.rpartition(".")[0], tree)


def _find(name: str) -> Path | None:
    """Finds a module's file. ``find_spec`` of a whole name would import its packages, and with them torch."""
    root, *parts = name.split(".")
    try:
        spec = find_spec(root)
    except (ImportError, ValueError):
        return None
    full, (origin, places) = root, _located(spec)
    for part in parts:
        full = f"{full}.{part}"
        try:
            specs = (finder.find_spec(full, places) for finder in sys.meta_path)
            origin, places = _located(next(filter(None, specs), None))
        except KeyError:  # of a folder without an __init__ file, whose parent is not imported
            origin, places = None, [str(Path(place, part)) for place in places]
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _located(spec: ModuleSpec | None) -> tuple[str | None, list[str]]:
    """Returns the file of a module, and the folders in which those below it are."""
    return (None, []) if spec is None else (spec.origin, [*(spec.submodule_search_locations or ())])


def find_class(path: str) -> Class | None:
    """Finds the definition of ``package.module.Class``."""
    definition = _follow(path)
    return definition if isinstance(definition, Class) else None


def _follow(path: str, passed: frozenset[str] = frozenset()) -> Class | Expression | None:
    name, _, attribute = path.rpartition(".")
    module = read_module(name) if name else None
    return None if module is None else resolve(attribute, module, passed)


def resolve(dotted: str, module: Module, passed: frozenset[str] = frozenset()) -> Class | Expression | None:
    """Finds what a module knows by a name; ``passed`` are names on the way, which may lead in a circle."""
    if (place := f"{module.name}.{dotted}") in passed:
        return None
    passed |= {place}
    head, _, rest = dotted.partition(".")
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and node.name == head and not rest:
            return Class(node, module)
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [dotted]:
            is_name = isinstance(node.value, ast.Name | ast.Attribute)
            return resolve(ast.unparse(node.value), module, passed) if is_name else Expression(node.value, module)
    for origin, names in _imports(module):
        for alias in names:
            if alias.name == "*" or (alias.asname or alias.name) == head:
                target = ".".join(filter(None, [origin, head if alias.name == "*" else alias.name, rest]))
                if (definition := _follow(target, passed)) is not None:
                    return definition
    return None


@cache
def _imports(module: Module) -> list[tuple[str, list[ast.alias]]]:
    """Lists what a module imports: from where, and the names."""
    imports, parts = [], module.package.split(".")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):  # `import a.b` binds a
            names = [alias if alias.asname else ast.alias(alias.name.partition(".")[0]) for alias in node.names]
            imports.append(("", names))
        elif isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) - node.level + 1] if node.level else []
            imports.append((".".join([*above, *filter(None, [node.module])]), node.names))
    return imports


@cache
def class_arguments(path: str) -> dict[str, Parameter] | None:
    """Returns all arguments of a class by name; None if the sources do not tell them."""
    definition = find_class(path)
    return None if definition is None else _arguments(definition)


def _arguments(definition: Class, below: tuple[ast.ClassDef, ...] = ()) -> dict[str, Parameter] | None:
    node, module = definition
    if node in below:  # a class that derives from itself
        return None
    methods = [item for item in ast.walk(node) if getattr(item, "name", getattr(item, "id", None)) == "__init__"]
    if node.decorator_list or node.keywords or any(method not in node.body for method in methods):
        return None
    parameters: dict[str, Parameter] = {}
    if methods:
        method = methods[-1]
        if not isinstance(method, ast.FunctionDef) or method.decorator_list:
            return None
        parameters = method_parameters(method, module)
        if method.args.kwarg is None:
            return parameters
        if not _passes_on(method, method.args.kwarg.arg):
            return None
    for base in node.bases:
        dotted = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        if dotted in ("Generic", "object"):
            continue
        parent = resolve(dotted, module)
        inherited = _arguments(parent, (*below, node)) if isinstance(parent, Class) else None
        if inherited is None:
            return None
        parameters = inherited | parameters
    return parameters


def method_parameters(method: ast.FunctionDef, module: Module) -> dict[str, Parameter]:
    """Returns the parameters of a method by name, without ``self``."""
    arguments = method.args
    places = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(places) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    items = zip([*places, *arguments.kwonlyargs], defaults, strict=True)
    return {item.arg: Parameter(item.annotation, default, module) for item, default in items if item.arg != "self"}


def _passes_on(method: ast.FunctionDef, kwargs: str) -> bool:
    """Tells whether ``**kwargs`` go to the base class whole."""
    calls = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
    forwards = [call for call in calls if ast.unparse(call.func) == "super().__init__"]
    passed = [word for call in forwards for word in call.keywords if word.arg is None]
    uses = [node for node in ast.walk(method) if isinstance(node, ast.Name) and node.id == kwargs]
    return len(uses) == len(passed) == 1 and passed[0].value is uses[0]


def missing_class(path: str) -> list[str] | None:
    """Returns the names that a module of this package, Lightning or torch has, if it lacks the one of a path; None if
    it has it, or its source leaves open what it has."""
    name, _, attribute = path.rpartition(".")
    names = _names(name) if name.partition(".")[0] in PACKAGES else None
    return None if names is None or attribute in names else sorted(names)


@cache
def _names(name: str) -> frozenset[str] | None:
    """Returns the names that a module has; None if its source leaves them open, or there is none."""
    module = read_module(name)
    if module is None or (name.partition(".")[0] != _OWN and _OPEN.search(ast.unparse(module.tree))):
        return None
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            with suppress(ValueError):
                names |= set(ast.literal_eval(node.value))
    names |= {alias.asname or alias.name for _, aliases in _imports(module) for alias in aliases}
    is_open = "*" in names and "__all__" not in names
    return None if is_open else frozenset(names - {"*"})


@cache
def class_names(*modules: str) -> frozenset[str]:
    """Returns the names of all classes in modules, and in all that are in packages."""
    names: set[str] = set()
    for module in modules:
        path = _find(module)
        if path is None:
            continue
        for file in path.parent.rglob("*.py") if path.name == "__init__.py" else [path]:
            names |= {name.decode() for name in re.findall(rb"^\s*class (\w+)", file.read_bytes(), re.MULTILINE)}
    return frozenset(names)


def table_keys(path: str) -> list[str]:
    """Returns the keys of a dict, or the items of a tuple, that a module writes down under a name; empty if its source
    does not tell them."""
    name, _, attribute = path.rpartition(".")
    module = read_module(name)
    for node in () if module is None else module.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict | ast.Tuple) and attribute in [getattr(target, "id", "") for target in targets]:
            keys = value.keys if isinstance(value, ast.Dict) else value.elts
            return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    return []
