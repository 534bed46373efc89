"""Exports trained models to the formats that inference engines load, and reads them back."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_lowbit.export.checkpoint import export_checkpoint
    from lightning_lowbit.export.loading import load, load_compressed

__all__ = ["export_checkpoint", "load", "load_compressed"]

_MODULES = {"export_checkpoint": "checkpoint", "load": "loading", "load_compressed": "loading"}

if not TYPE_CHECKING:  # a type checker would take every name for one that is here

    def __getattr__(name: str) -> Any:
        """Imports what is asked for: names of formats need no torch."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return globals()[name]
