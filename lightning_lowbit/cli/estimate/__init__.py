"""The subcommand ``lowbit estimate``."""

from lightning_lowbit.cli.estimate.command import estimate

__all__ = ["estimate"]
