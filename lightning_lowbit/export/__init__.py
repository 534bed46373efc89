"""Exports trained models to the formats that inference engines load, and reads them back."""

from lightning_lowbit.export.checkpoint import export_checkpoint
from lightning_lowbit.export.compressed import load_compressed
from lightning_lowbit.export.loading import load

__all__ = ["export_checkpoint", "load", "load_compressed"]
