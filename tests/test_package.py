"""What a wheel must hold, read off the sources."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "lightning_lowbit").rglob("__init__.py")}
    found = {".".join(folder.parts) for folder in folders} | {"lightning_lowbit.recipes"}
    assert set(listed) == found, "pyproject.toml's packages and the folders differ: a wheel would lack one"


def test_recipes_are_package_data():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in (ROOT / "recipes").iterdir():
        if path.suffix in (".yaml", ".md"):
            assert f"*{path.suffix}" in data["lightning_lowbit.recipes"], f"a wheel would lack {path.name}"
