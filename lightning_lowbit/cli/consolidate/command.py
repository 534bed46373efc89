"""``lowbit consolidate``: one file of a checkpoint in shards."""

from argparse import Namespace

from lightning_lowbit.precision.checkpoints.files import consolidate as write


def consolidate(options: Namespace) -> None:
    write(options.folder, options.output)
    print(f"Written to {options.output}")
