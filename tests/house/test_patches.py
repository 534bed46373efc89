"""Tests look at the package from outside. Where one replaces a name in it, a reason stands here."""

from pathlib import Path

from tests.house.patches import patches

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
    "nn/gemm/test_emulated.py": "CPUs with and without instructions for a dtype",
    "nn/linear/test_any_name.py": "the registry of linear layers has no way back",
    "nn/native/test_devices.py": "a GPU is played by the CPU",
    "nn/native/test_int8.py": "native GEMMs are noted",
    "nn/test_qat.py": "CPUs with and without instructions for a dtype",
    "nn/test_shared.py": "how often an operand is made shows in no result",
    "optim/moments/test_fp8_adam.py": "what rounding to nearest would do",
    "optim/test_passes.py": "a machine without a compiler; a pass that must not be called",
    "precision/base/test_training.py": "CPUs with and without instructions for a dtype",
    "precision/checkpoints/test_older_version.py": "an older version drew other random bits",
    "precision/fp8/test_training.py": "a device to which tensors move",
    "precision/test_compute_dtype.py": "CPUs with and without instructions for a dtype",
    "recipes/conftest.py": "drawing charts takes a third of a run's time",
    "recipes/test_preferences.py": "of two answers the tokens are compared, which show in no result",
    "recipes/test_recipes.py": "the command keeps no plugin to look at",
    "test_compilation.py": "a warning comes once in a process",
}


def test_each_patch_has_a_reason_and_there_are_no_more_of_them():
    names = {str(path.relative_to(TESTS)): [*patches(path)] for path in TESTS.rglob("*.py")}
    count = sum(map(len, names.values()))
    new = {path: patched for path, patched in names.items() if patched and path not in REASONS}
    assert not new, f"{new}: use an argument, a context or an attribute of the package, or say why there is none"
    assert count <= MOST, f"{count} patches, {MOST} at most"


def test_patches_are_told_from_the_outside_world(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text(
        "import torch\nfrom lightning_lowbit.optim import rules\nclass Own: ...\n"
        "monkeypatch.setattr(rules, 'AFTER', 2)\nmock.patch.object(rules.x, 'y', 2)\n"
        "m.setattr('lightning_lowbit.a', 1)\n"
        "for r in rules: m.setattr(r, 'z', 1)\n"
        "m.setattr(torch, 'compile', 1), m.setattr(rules, 'time', 1), m.setattr(rules.sys, 'argv', 1)\n"
        "m.setattr(Own, 'a', 1), m.setattr('torch.a', 1)\n"
    )
    assert [*patches(path)] == ["rules.AFTER", "rules.x.y", "lightning_lowbit.a", "r.z"]
