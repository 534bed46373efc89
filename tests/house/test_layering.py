"""Imports point downwards, and optional packages are imported where they are used.

Lightning is imported by `_lightning` alone, which alone touches its private parts, and `_lightning` by level 5 and
above. Torch's private parts are touched by `_torch` alone.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import lightning_lowbit
from tests.house import structure
from tests.house.structure import nodes, tree

ROOT = Path(lightning_lowbit.__file__).parent
LEVELS = [
    "_finders _torch atomic_files checks compilation data_sheets formats packages saved_state signals units",
    "patterns quant",
    "distributed kernels",
    "nn optim metrics",
    "_lightning",
    "precision callbacks report export",
    "scalers cli",
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names.split()}
TOGETHER = {*LEVELS[5].split()}  # of one level, and used by each other
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
OPTIONAL = {"transformers", "datasets", "torchmetrics", "tensorboard", "rich", "matplotlib", "triton"}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
OBJECTS_OF_LIGHTNING = re.compile(r"(\w+_)?(trainer|loop|connector|strategy)")
RECIPES = sorted((ROOT.parent / "recipes").rglob("*.py"))
FOREIGN_TO_LIGHTNING = [path for path in FILES + RECIPES if path != ROOT / "_lightning.py"]


def imports(path):
    """(module, whether at the top level of the file) of each import, also for type checkers."""
    for node in nodes(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        yield from ((name, node in tree(path).body) for name in names)


def test_every_file_has_a_level():
    assert {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES} == set(LEVEL)


# Modules in Triton's language.
OF_TRITON = {"codes", "device", "kernels", "layouts", "passes", "products", "scales", "tiles"}


def test_imports_point_downwards():
    for path in FILES:
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        where = f"{path.relative_to(ROOT)} (level {LEVEL[package]})"
        for name, at_top in imports(path):
            top, *rest = name.split(".")
            if top == "lightning_lowbit":
                assert rest, f"{where} imports the whole package: name the module"
                target = rest[0]
                is_lower = LEVEL[target] < LEVEL[package]
                same_level = target in (package, "_torch") or {target, package} <= TOGETHER
                uses_lightning = target == "_lightning" and LEVEL[package] < 5
                assert not uses_lightning, f"{where} imports Lightning"
                assert is_lower or same_level, f"{where} imports {target} ({LEVEL[target]})"
            in_triton = path.parent == ROOT / "kernels" / "gpu"  # imported where kernels are launched
            is_of_kernels = in_triton and path.stem in OF_TRITON
            assert top != "triton" or in_triton, f"{where} imports Triton: its kernels live in kernels/gpu"
            if top in OPTIONAL and not is_of_kernels:
                assert not at_top, f"{where} imports the optional package {top} at its top level"


def test_lightning_is_imported_by_one_module_alone():
    for path in FOREIGN_TO_LIGHTNING:
        names = [name for name, _ in imports(path) if name.split(".")[0] in LIGHTNING]
        assert not names, f"{path} imports {names}: import from lightning_lowbit._lightning"


def private_parts(path):
    """Private attributes of objects of Lightning that a file touches, such as `trainer.fit_loop._data_fetcher`."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_[^_].*", node.attr):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            is_foreign = OBJECTS_OF_LIGHTNING.fullmatch(name) or node.attr.startswith("_ModelCheckpoint__")
            if is_foreign:
                yield f"{name}.{node.attr}"


def test_private_parts_of_lightning_are_touched_by_one_module_alone():
    assert {"fit_loop._should_accumulate", "trainer._results"} <= {*private_parts(ROOT / "_lightning.py")}
    for path in FOREIGN_TO_LIGHTNING:
        found = [*private_parts(path)]
        assert not found, f"{path} touches {found}: write a function for it in lightning_lowbit._lightning"


# Private names of other packages than torch and Lightning, with their owners.
FOREIGN = {
    "_actions": "argparse",
    "_attn_implementation": "transformers",
    "_getframe": "sys",
    "_no_split_modules": "transformers",
    "_asdict": "namedtuple",
    "_fields": "namedtuple",
    "_replace": "namedtuple",
}


def private_names(path):
    """Names with one leading underscore that a file reads from objects other than `self`, or imports from torch."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_[^_].*", node.attr):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "_aten")  # or an operator
            if not is_own:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if re.fullmatch(r"_[^_].*", part))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if re.fullmatch(r"_[^_].*", name):
                yield name


def names_defined(path):
    """Private names that a file defines: functions, attributes of `self`, and fields of classes."""
    for node in nodes(path):
        if isinstance(node, structure.Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)


def test_private_parts_of_torch_are_touched_by_one_module_alone():
    others = [path for path in FOREIGN_TO_LIGHTNING if ROOT / "_torch" not in path.parents]
    defined = {name for path in others for name in names_defined(path)} | set(FOREIGN)
    foreign = {str(path): names for path in others if (names := sorted({*private_names(path)} - defined))}
    assert not foreign, f"{foreign}: write a function for it in lightning_lowbit/_torch"


# --- shape ------------------------------------------------------------------------------------------------------------

NN = ("native", "casts", "core", "layers", "state", "attention", "sharded", "conversion")

# Imports of the package inside functions, with their reasons.
INSIDE = {
    "cli/__init__.py: cli.command.main": "importing `lightning_lowbit.cli` is free",
    "cli/command.py: _lightning.MisconfigurationException": "commands that do not train import no torch",
    "cli/configs.py: nn.casts.traits.OPERANDS": "commands that do not train import no torch",
    "cli/lab/estimate/shapes.py: nn.sharded.gather.casts_obstacle": "needs FSDP2, whose parts may move",
    "kernels/gpu/casts.py: kernels.gpu.kernels": "imports Triton, which is optional",
    "precision/layers.py: nn.sharded.gather.WeightGathers": "needs FSDP2, whose parts may move",
    "precision/layers.py: nn.sharded.gather.check_gathers": "needs FSDP2, whose parts may move",
}


def test_rooms_of_nn_import_only_those_before_them():
    assert {path.parent.name for path in (ROOT / "nn").glob("*/*.py")} == set(NN)
    assert not structure.rooms_upward(ROOT, "nn", NN)


def test_no_modules_import_each_other():
    assert not structure.circles(ROOT)


def test_imports_inside_functions_have_a_reason():
    inside = structure.inside(ROOT)
    assert inside == set(INSIDE), f"without a reason: {inside - set(INSIDE)}; gone: {set(INSIDE) - inside}"


def test_a_file_fits_in_one_reading_and_a_folder_on_one_screen():
    tests = sorted(Path(__file__).parents[1].rglob("*.py"))
    long = structure.long_files([*FILES, *RECIPES, *tests])
    assert not long, f"lines of code: {long}; 300 at most"
    folders = Counter(path.parent for path in [*FILES, *RECIPES, *tests])
    full = {str(folder): n for folder, n in folders.items() if n > 14}
    assert not full, f"files: {full}; 14 at most"


def test_a_function_fits_on_one_screen():
    long = structure.long_functions(path for path in FILES + RECIPES if path.parent != ROOT / "kernels" / "gpu")
    assert not long, f"lines of code: {long}; 60 at most"


def test_variables_are_named_by_nouns():
    words = {str(path): names for path in FILES if (names := structure.dialect(path))}
    count = sum(map(len, words.values()))
    assert count <= 40, f"{count} names such as {sorted({name for names in words.values() for name in names})}: {words}"
