"""The ``lowbit`` command."""

from lightning_lowbit.cli.command import main

__all__ = ["main"]
