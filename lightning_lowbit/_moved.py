"""Modules under their former names, for one version.

Importing one of them, as pickles of classes do, warns and gives the contents of the modules that hold them now.
"""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NN = {
    "amax": ("state.amax",),
    "calls": ("core.calls",),
    "casts_from_yaml": ("casts.from_yaml",),
    "conversion.layers": ("conversion.inventory", "layers.layer"),
    "function": ("core.function",),
    "gemm": ("core.gemm",),
    "keys": ("state.keys", "layers.layer"),
    "layers.derive": ("layers.registry",),
    "layers.frozen": ("core.frozen",),
    "layers.linear": ("layers.known_linears",),
    "layers.patches": ("core.sides",),
    "layers.source": ("core.operands",),
    "layers.window": ("core.window",),
    "linear": ("layers.layer", "layers.registry"),
    "native.layer": ("layers.native",),
    "operands": ("core.operands",),
    "plan": ("casts.plan",),
    "presets": ("casts.presets",),
    "saving": ("core.saving",),
    "sharded.parallel": ("core.parallel",),
    "watch": ("core.watch",),
}
MOVED = {f"nn.{old}": tuple(f"nn.{new}" for new in modules) for old, modules in _NN.items()}
_PACKAGE = "lightning_lowbit."


class _FormerNames(MetaPathFinder, Loader):
    """Finds modules under their former names, and makes them of those that hold their contents now."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_former = fullname.startswith(_PACKAGE) and fullname.removeprefix(_PACKAGE) in MOVED
        return ModuleSpec(fullname, self) if is_former else None

    def exec_module(self, module: ModuleType) -> None:
        names = [_PACKAGE + name for name in MOVED[module.__name__.removeprefix(_PACKAGE)]]
        sources = [importlib.import_module(name) for name in names]

        def __getattr__(name: str) -> Any:
            for source in sources:
                if hasattr(source, name):
                    return getattr(source, name)
            raise AttributeError(f"module {module.__name__!r}, now {' and '.join(names)}, has no attribute {name!r}")

        module.__getattr__ = __getattr__  # type: ignore[method-assign]
        warnings.warn(
            f"{module.__name__} is now {' and '.join(names)}; the former name goes with the next version.",
            DeprecationWarning,
            stacklevel=2,
        )


def install() -> None:
    """Lets former names be imported."""
    sys.meta_path.append(_FormerNames())
