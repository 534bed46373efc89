"""The subcommand ``lowbit compare``."""

from lightning_lowbit.cli.compare.command import compare

__all__ = ["compare"]
