"""The formats of ``lowbit export``, one file for each family."""

from lightning_lowbit.export.formats.base import Format, Options, Written, row

__all__ = ["Format", "Options", "Written", "row"]
