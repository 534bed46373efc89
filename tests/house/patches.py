"""Names of the package that tests replace."""

import ast
import sys

from tests.house.structure import nodes

# Names that a module imports from elsewhere: to replace them is to simulate the outside world.
OUTSIDE = {*sys.stdlib_module_names, "find_spec"}


def patches(path):
    """What a test file replaces, by `setattr` of a monkeypatch or by `mock.patch.object`, in the package.

    Variables that the file does not import count, too. Attributes of its own classes and of other packages do not.
    """
    places = _imports(path)
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) > 1:
            owner = ast.unparse(node.func.value)
            is_patch = (node.func.attr, owner) == ("object", "mock.patch") or node.func.attr == "setattr"
            place, names = _target(*node.args[:2], places)
            if is_patch and place.split(".")[0] == "lightning_lowbit" and not OUTSIDE & set(names):
                yield ".".join(names)


def _target(first, second, places):
    """Returns the module from which the first name of a patch comes, and all its names."""
    if isinstance(first, ast.Constant):
        return str(first.value), str(first.value).split(".")
    name = second.value if isinstance(second, ast.Constant) else ast.unparse(second)
    names = [*ast.unparse(first).split("."), name]
    return places.get(names[0], "lightning_lowbit"), names


def _imports(path):
    places = {}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            places |= {alias.asname or alias.name: node.module or "" for alias in node.names}
        elif isinstance(node, ast.Import):
            places |= {(alias.asname or alias.name).split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            places[node.name] = "tests"
    return places
