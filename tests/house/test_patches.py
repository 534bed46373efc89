"""Tests look at the package from outside. Where one replaces a name in it, a reason stands here."""

import ast
import re
import sys
from pathlib import Path

from tests.house.structure import nodes

TESTS = Path(__file__).parents[1]
MOST = 56  # patches; a new one takes the place of another

REASONS = {
    "callbacks/monitors/quantization/test_columns.py": "FSDP1, which flattens weights, needs several processes",
    "callbacks/osci_reset/test_runs.py": "sharded weights need several processes",
    "callbacks/switches/gradual/test_shares.py": "how often all layers are gone through shows in no result",
    "cli/run/test_evaluation.py": "the batches of a command are to be evaluated in other ways",
    "cli/run/test_mistakes.py": "Ctrl-C comes at one moment",
    "cli/test_checkpoints.py": "a file vanishes between two looks at its folder",
    "cli/test_paths.py": "errors of libraries in Rust come from full and broken disks",
    "docs/test_examples.py": "the command keeps no callback to look at",
    "export/test_export.py": "how often weights are read shows in no result; clients that compute something else",
    "kernels/passes.py": "launches are counted",
    "kernels/steps.py": "other ranks and a GPU are played by this process",
    "kernels/test_casts.py": "kernels that are wrong, and kernels that must not be called",
    "kernels/test_failures.py": "compilers, loaders and drivers fail",
    "kernels/test_layers.py": "calls of the library are counted",
    "kernels/test_triton.py": "a GPU is played by this process",
    "kernels/test_triton_aot.py": "the first launch alone may ask for a kernel",
    "kernels/test_triton_ptx.py": "a GPU is played by an emulator",
    "kernels/test_triton_steps.py": "kernels that are wrong or fail",
    "nn/attention/test_function.py": "small matrices in several tiles; without casts, torch computes",
    "nn/attention/test_multihead.py": "without casts, torch computes",
    "nn/gemm/conftest.py": "native GEMMs are noted, and large ones take minutes on CPUs",
    "nn/gemm/test_native_fp8_layers.py": "a GPU that is not there can be asked for its name alone",
    "nn/linear/test_any_name.py": "the registry of linear layers has no way back",
    "nn/linear/test_operands.py": "how often an operand is made shows in no result",
    "nn/native/test_devices.py": "a GPU is played by the CPU",
    "nn/native/test_int8.py": "native GEMMs are noted",
    "optim/moments/test_fp8_adam.py": "what rounding to nearest would do",
    "optim/test_passes.py": "a machine without a compiler; a pass that must not be called",
    "precision/checkpoints/test_older_version.py": "an older version drew other random bits",
    "precision/fp8/test_training.py": "a device to which tensors move",
    "recipes/conftest.py": "drawing charts takes a third of a run's time",
    "recipes/tuning/test_preferences.py": "of two answers the tokens are compared, which show in no result",
    "recipes/test_recipes.py": "the command keeps no plugin to look at",
    "test_compilation.py": "a warning comes once in a process",
}


# Names that a module imports from elsewhere: to replace them is to simulate the outside world.
OUTSIDE = {*sys.stdlib_module_names, "find_spec"}


def patches(path):
    """What a test file replaces, by `setattr` of a monkeypatch or by `mock.patch.object`, in the package.

    Variables that the file does not import count, too. Attributes of its own classes and of other packages do not.
    """
    if not re.search(r"\bsetattr\(|\bmock\.patch\.object\(", path.read_text()):  # to parse all files takes seconds
        return
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


def test_each_patch_has_a_reason_and_there_are_no_more_of_them():
    names = {str(path.relative_to(TESTS)): [*patches(path)] for path in TESTS.rglob("*.py")}
    count = sum(map(len, names.values()))
    new = {path: replaced for path, replaced in names.items() if replaced and path not in REASONS}
    assert not new, f"{new}: use an argument, a context or an attribute of the package, or say why there is none"
    assert "compilation._has_warned" in names["test_compilation.py"], "patches are not seen"
    assert count <= MOST, f"{count} patches, {MOST} at most"
