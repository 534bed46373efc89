"""Imports point downwards, and optional packages are imported where they are used.

L0 checks, formats    L1 kernels    L2 quant    L3 nn, optim, metrics    L4 scalers    L5 precision, callbacks    L6 cli
L7 recipes
"""

import ast
from pathlib import Path

import pytest

import lightning_lowbit

ROOT = Path(lightning_lowbit.__file__).parent
LEVELS = {
    "checks": 0,
    "formats": 0,
    "kernels": 1,
    "quant": 2,
    "nn": 3,
    "optim": 3,
    "metrics": 3,
    "scalers": 4,
    "precision": 5,
    "callbacks": 5,
    "cli": 6,
}
MAY_IMPORT_LIGHTNING = {"precision", "callbacks", "cli"}
OPTIONAL = {"transformers", "datasets", "torchmetrics", "tensorboard", "rich", "matplotlib", "triton"}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imports(path):
    """(module, whether at the top level of the file) of each import."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            yield name, node in tree.body


def test_every_file_has_a_level():
    assert {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES} == set(LEVELS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name, at_top in imports(path):
        top, *rest = name.split(".")
        if top == "lightning_lowbit":
            assert rest, f"{path.name} imports the whole package: name the module"
            target = rest[0]
            is_lower = LEVELS[target] < LEVELS[package]
            same_level = target == package or {target, package} == {"precision", "callbacks"}
            assert is_lower or same_level, f"{package} (level {LEVELS[package]}) imports {target} ({LEVELS[target]})"
        if top in ("lightning", "lightning_utilities", "pytorch_lightning"):
            assert package in MAY_IMPORT_LIGHTNING, f"{package} imports Lightning"
        if top == "triton":
            assert package == "kernels", f"{package} imports Triton"
        if top in OPTIONAL:
            assert not at_top, f"{path.name} imports the optional package {top} at its top level"
