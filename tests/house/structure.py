"""The shape of the package, counted. `python -m tests.house.structure [ROOT]` prints it, also for an older checkout.

Functions take the folder of a package and return what a reader would have to count by hand.
"""

import ast
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Participles and pronouns, which say nothing of a value.
DIALECT = re.compile(r"found|given|made|kept|own|told|there|each|of_\w+")


@cache
def tree(path):
    return ast.parse(path.read_text())


@cache
def nodes(path):
    return list(ast.walk(tree(path)))


def modules(package):
    """Files of a package by dotted names, which begin with the package's."""
    parts = {path: path.relative_to(package.parent).with_suffix("").parts for path in sorted(package.rglob("*.py"))}
    return {".".join(names).removesuffix(".__init__"): path for path, names in parts.items()}


def code_lines(path):
    """Lines of a file without blank ones, comments and docstrings."""
    return sum(is_code for is_code in _is_code(path))


def long_files(paths):
    """Files of more than 300 lines of code, with their numbers; shorter ones are not parsed."""
    long = (path for path in paths if path.read_bytes().count(b"\n") > 300)
    return {str(path): lines for path in long if (lines := code_lines(path)) > 300}


@cache
def _is_code(path):
    prose = set()
    for node in nodes(path):
        is_block = isinstance(node, (ast.Module, ast.ClassDef, Function))
        if is_block and ast.get_docstring(node, clean=False) is not None:
            prose |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(path.read_text().splitlines(), 1)
    return tuple(
        bool(line.strip()) and not line.strip().startswith("#") and number not in prose for number, line in lines
    )


def functions(path):
    """Functions of a file with their qualified names."""
    waiting = [("", node) for node in tree(path).body]
    for scope, node in waiting:
        if isinstance(node, Function):
            yield f"{scope}{node.name}", node
        if isinstance(node, (ast.ClassDef, Function)):
            waiting += [(f"{scope}{node.name}.", inner) for inner in node.body]


def function_lines(path, function):
    """Lines of code of a function's body."""
    return sum(_is_code(path)[function.body[0].lineno - 1 : function.end_lineno])


def imports(path):
    """Names that a file imports, but for type checkers alone, and whether at the top level of the file."""
    blocks = (node for node in nodes(path) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    for_types = {id(inner) for block in blocks for inner in ast.walk(block)}
    for node in nodes(path):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in for_types:
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((module + alias.name, node in tree(path).body) for alias in node.names)


def inside(package):
    """Imports of the package within functions."""
    return {
        f"{path.relative_to(package)}: {name.removeprefix(f'{package.name}.')}"
        for path in package.rglob("*.py")
        for name, at_top in imports(path)
        if name.startswith(f"{package.name}.") and not at_top and path != package / "__init__.py"
    }


def long_functions(paths):
    """Functions of more than 60 lines of code, with their numbers."""
    return {
        f"{path}:{name}": lines
        for path in paths
        for name, function in functions(path)
        if (lines := function_lines(path, function)) > 60
    }


@cache
def graph(package):
    """Modules of a package that each of its modules imports, within functions too."""
    files = modules(package)
    names = {name: {whole for whole, _ in imports(path)} for name, path in files.items()}
    return {
        name: {whole if whole in files else whole.rpartition(".")[0] for whole in wholes} & set(files) - {name}
        for name, wholes in names.items()
    }


def circles(package):
    """Groups of modules that import each other, directly or not; the package's own ``__init__`` is left out."""
    edges = {name: targets - {package.name} for name, targets in graph(package).items() if name != package.name}

    def reachable(name):
        reached, waiting = set[str](), [name]
        while waiting:
            new = edges[waiting.pop()] - reached
            reached |= new
            waiting += new
        return reached

    closure = {name: reachable(name) for name in edges}
    groups = {frozenset({other for other in closure[name] if name in closure[other]}) for name in edges}
    return [sorted(group) for group in groups if group]


def rooms_upward(package, folder, order):
    """Imports from a room of a folder to a later one; ``order`` begins with the rooms that import no other."""
    prefix = f"{package.name}.{folder}."
    upward = []
    for name, targets in graph(package).items():
        for target in targets:
            if name.startswith(prefix) and target.startswith(prefix):
                room, other = (module.removeprefix(prefix).split(".")[0] for module in (name, target))
                if room != other and order.index(room) < order.index(other):
                    upward.append(f"{name} imports {target}")
    return upward


def dialect(path):
    """Names that are assigned and say nothing of their value."""
    names = (node for node in nodes(path) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return [name.id for name in names if DIALECT.fullmatch(name.id)]


def main(root):
    package = root / "lightning_lowbit"
    rooms, words = Counter[str](), Counter[str]()
    for path in modules(package).values():
        parts = path.relative_to(package).parts
        depth = 2 if parts[0] == "nn" and len(parts) > 2 else 1
        for room in ("/".join(parts[:depth]) if len(parts) > 1 else "(top)", "all"):
            rooms[room, "files"] += 1
            rooms[room, "lines"] += len(path.read_text().splitlines())
            rooms[room, "code"] += code_lines(path)
        words.update(dialect(path))
    print("room                 files   lines    code")
    for room in sorted({room for room, _ in rooms}, key=lambda room: (room == "all", room)):
        print(f"{room:20} {rooms[room, 'files']:5} {rooms[room, 'lines']:7} {rooms[room, 'code']:7}")
    print("functions above 60 lines of code:", ", ".join(long_functions(modules(package).values())) or "none")
    print("circles of imports:", [f"{len(group)} around {group[0]}" for group in circles(package)] or "none")
    print("imports of the package inside functions:", len(inside(package)))
    print(f"names that say nothing: {words.total()} ({', '.join(f'{w} {n}' for w, n in words.most_common(8))})")


if __name__ == "__main__":
    main(Path(*sys.argv[1:2]))
