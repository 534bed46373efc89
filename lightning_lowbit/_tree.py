"""The recipes of sources that are not installed: they lie beside the package, into which an installation maps them."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from os.path import dirname, isfile, join
from typing import Any

_NAME = "lightning_lowbit.recipes"
_FOLDER = join(dirname(dirname(__file__)), "recipes")


class _Recipes:
    """Finds the recipes, after all finders of installed packages."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        file = join(_FOLDER, "__init__.py")
        if fullname != _NAME or not isfile(file):
            return None
        return spec_from_file_location(fullname, file, submodule_search_locations=[_FOLDER])


def install() -> None:
    """Lets ``lightning_lowbit.recipes`` be imported from the sources."""
    sys.meta_path.append(_Recipes())
