"""The ``lowbit`` command."""

from lightning_lowbit.cli.search_path import current_folder_last

with current_folder_last():
    from lightning_lowbit.cli.command import main

__all__ = ["main"]
