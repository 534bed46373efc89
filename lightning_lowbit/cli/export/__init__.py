"""``lowbit export``."""

from lightning_lowbit.cli.export.command import export

__all__ = ["export"]
