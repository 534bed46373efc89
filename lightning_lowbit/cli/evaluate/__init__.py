"""The subcommand ``lowbit evaluate``."""

from lightning_lowbit.cli.evaluate.command import evaluate

__all__ = ["evaluate"]
