"""The subcommand ``lowbit inspect``."""

from lightning_lowbit.cli.inspect.command import inspect

__all__ = ["inspect"]
