"""What a wheel must hold, what the package offers, read off the sources, and which Lightning it uses."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lightning_lowbit
from lightning_lowbit._finders import MOVED
from lightning_lowbit._lightning import _decide
from lightning_lowbit.packages import install, install_extra, with_extra
from tests.tables import each

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXTS = {".py", ".md", ".yaml", ".sh", ".html", ".css", ".json"}


def test_every_package_is_listed():
    listed = PROJECT["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "lightning_lowbit").rglob("__init__.py")}
    folders |= {"lightning_lowbit" / path.parent.relative_to(ROOT) for path in (ROOT / "recipes").rglob("__init__.py")}
    found = {".".join(folder.parts) for folder in folders}
    assert set(listed) == found, "pyproject.toml's packages and the folders differ: a wheel would lack one"


def test_recipes_are_package_data():
    data = PROJECT["tool"]["setuptools"]["package-data"]["lightning_lowbit.recipes"]
    paths = [path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*")]
    wanted = {str(path.with_name(f"*{path.suffix}")) for path in paths if path.suffix in (".yaml", ".md")}
    assert wanted <= set(data), f"a wheel would lack {wanted - set(data)}"


def test_what_type_checkers_see_is_what_is_imported_when_it_is_asked_for():
    body = ast.parse(Path(lightning_lowbit.__file__).read_text()).body
    (block,) = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    names = {node.module: [alias.name for alias in node.names] for node in block.body}
    stars = {module: importlib.import_module(module).__all__ for module, given in names.items() if given == ["*"]}
    seen = {name: module for module, given in {**names, **stars}.items() for name in given}
    assert sorted(seen) == sorted(lightning_lowbit.__all__)
    for name, module in seen.items():
        vars(lightning_lowbit).pop(name, None)  # as if it had not been asked for yet
        assert getattr(lightning_lowbit, name) is getattr(importlib.import_module(module), name), name


def test_names_and_subpackages_are_there_and_no_others():
    assert {*lightning_lowbit.__all__, "nn", "precision", "scalers", "__version__"} <= set(dir(lightning_lowbit))
    assert lightning_lowbit.nn.LayerKeys.__name__ == "LayerKeys"
    with pytest.raises(AttributeError, match="module 'lightning_lowbit' has no attribute 'FP5Precision'"):
        lightning_lowbit.FP5Precision  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'FP5Precision'"):
        from lightning_lowbit import FP5Precision  # noqa: F401


def test_imported_packages_are_declared():
    """At the top of files alone: optional packages are imported where they are used (see test_layering). Modules of a
    command are imported when it runs."""
    declared = {re.match(r"[\w-]+", line)[0].lower() for line in PROJECT["project"]["dependencies"]}
    declared |= {"lightning_utilities", "lightning_fabric", "pytorch_lightning"}  # come with lightning
    found = {}
    for path in (ROOT / "lightning_lowbit").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            if "cli" in path.parts:  # which looks for these first
                names = [name for name in names if name.partition(".")[0] not in ("jsonargparse", "scipy")]
            found |= {{"yaml": "pyyaml"}.get(top, top): path.name for name in names if (top := name.split(".")[0])}
    missing = found.keys() - declared - sys.stdlib_module_names - {"lightning_lowbit", "triton"}
    assert not missing, f"not among the dependencies: {[(name, found[name]) for name in missing]}"


def test_sources_hold_the_recipes_without_an_installation_and_beside_one_of_another_clone(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    code = f"""if True:
        import sys
        from importlib.util import find_spec, spec_from_file_location
        sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]

        class OtherClone:
            def find_spec(name, path=None, target=None):
                file = {str(tmp_path / "recipes" / "__init__.py")!r}
                return spec_from_file_location(name, file) if name == "lightning_lowbit.recipes" else None

        if OTHER: sys.meta_path.insert(0, OtherClone)
        print(find_spec("lightning_lowbit.recipes.tuning.adapters").origin)
    """
    for other in ("False", "True"):
        command = [sys.executable, "-c", code.replace("OTHER", other)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert Path(result.stdout.strip()) == ROOT / "recipes" / "tuning" / "adapters.py"


@pytest.mark.slow  # a process of its own
def test_plugins_train_without_jsonargparse_and_the_command_asks_for_it(tmp_path):
    code = """if True:
        import importlib.metadata, sys
        distribution = importlib.metadata.distribution

        def others(name):
            if name == "jsonargparse":
                raise importlib.metadata.PackageNotFoundError(name)
            return distribution(name)

        importlib.metadata.distribution, sys.modules["jsonargparse"] = others, None
        from lightning.pytorch import Trainer
        from lightning.pytorch.demos.boring_classes import BoringModel
        from lightning_lowbit import FP4Precision, RunReport
        from lightning_lowbit.cli import main
        model = BoringModel()
        Trainer(fast_dev_run=2, plugins=[FP4Precision(skip=[])], callbacks=[RunReport()], accelerator="cpu").fit(model)
        assert type(model.layer).__name__ == "QuantLinear"
        assert main(["fit", "--config", "quickstart"]) == 2
    """
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "error: `lowbit fit` needs jsonargparse: pip install " in result.stderr
    assert "[recipes]" in result.stderr


def test_no_text_installs_this_package_from_an_index():
    """An index may hold another project of this name: the clone is installed, or the packages that are missing."""
    told = re.compile(r"(pip|uv|pipx|conda|poetry)\b[^\n]*\b(install|add)\b[^\n]*\blightning[-_.]lowbit\b")
    folders = ("lightning_lowbit", "recipes", "docs", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.cff")]
    lines = [f"{path}: {found[0]}" for path in files for found in told.finditer(path.read_text())]
    assert not lines
    assert f"git clone {PROJECT['project']['urls']['Repository']}\n" in (ROOT / "docs" / "index.md").read_text()


@each(
    "packages, command",
    [
        (["peft_of_nobody"], "pip install peft_of_nobody"),
        (["compressed_tensors"], r"pip install 'compressed-tensors>=[\d.]+'"),
        (["lm-eval", "Matplotlib"], r"pip install 'lm_eval\[hf\]>=[\d.]+' 'matplotlib>=[\d.]+'"),
    ],
)
def test_the_command_for_missing_packages_names_them_with_their_versions(packages, command):
    assert re.fullmatch(command, install(*packages))


def test_an_extra_is_installed_as_the_package_was(tmp_path):
    wheel, url = tmp_path / "lightning_lowbit.whl", "https://example.com/x"
    wheel.touch()
    vcs = {"vcs": "git", "commit_id": "123abc"}
    table = [
        ({}, ["lightning_lowbit[recipes]==0.2.0"]),
        ({"url": tmp_path.as_uri(), "dir_info": {"editable": True}}, ["-e", f"{tmp_path}[recipes]"]),
        ({"url": tmp_path.as_uri(), "dir_info": {}}, [f"{tmp_path}[recipes]"]),
        ({"url": wheel.as_uri(), "archive_info": {}}, [f"lightning_lowbit[recipes] @ {wheel.as_uri()}"]),
        ({"url": "file:///gone", "dir_info": {}}, ["lightning_lowbit[recipes]==0.2.0"]),
        ({"url": url, "archive_info": {}}, [f"lightning_lowbit[recipes] @ {url}"]),
        ({"url": url, "vcs_info": vcs}, [f"lightning_lowbit[recipes] @ git+{url}@123abc"]),
    ]
    for origin, arguments in table:
        assert with_extra("recipes", "0.2.0", origin) == arguments, origin


def test_packages_belong_to_the_first_extra_that_names_them():
    assert re.fullmatch(r"pip install .*\[recipes\].*", install_extra("transformers"))
    assert re.fullmatch(r"pip install .*\[export\].*", install_extra("compressed_tensors"))
    assert install_extra("package_of_nobody") is None


def test_the_citation_names_this_version():
    assert f"version: {lightning_lowbit.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_lightning_that_was_imported_first_is_used():
    both = ["lightning", "lightning.pytorch", "pytorch_lightning"]
    table = [
        ([], "lightning.pytorch"),
        (["lightning.fabric", "lightning_fabric"], "lightning.pytorch"),
        (["pytorch_lightning"], "pytorch_lightning"),
        (["lightning.fabric", "pytorch_lightning"], "pytorch_lightning"),
        (["lightning.pytorch"], "lightning.pytorch"),
        (both, "lightning.pytorch"),
        (both[::-1], "pytorch_lightning"),
    ]
    for imported, used in table:
        assert _decide(["os", *imported, "torch"]) == used, imported


def test_every_former_name_warns_and_gives_what_its_modules_hold():
    for former, modules in MOVED.items():
        sys.modules.pop(f"lightning_lowbit.{former}", None)  # another test may have read a pickle of a former version
        with pytest.warns(DeprecationWarning, match=f"lightning_lowbit.{former} is now lightning_lowbit.{modules[0]}"):
            module = importlib.import_module(f"lightning_lowbit.{former}")
        for name in modules:
            source = importlib.import_module(f"lightning_lowbit.{name}")
            for key, value in vars(source).items():
                if getattr(value, "__module__", "") == source.__name__ and key[:2] != "__":
                    assert getattr(module, key) is value


def test_a_former_module_has_former_names_of_classes_and_refuses_what_no_module_holds():
    with pytest.warns(DeprecationWarning):
        keys, plan = (importlib.reload(importlib.import_module(f"lightning_lowbit.nn.{x}")) for x in ("keys", "plan"))
    assert plan.Plan is importlib.import_module("lightning_lowbit.nn.casts.traits").CastTraits
    with pytest.raises(AttributeError, match="lightning_lowbit.nn.state.keys and .* has no attribute 'nothing'"):
        keys.nothing  # noqa: B018
