"""The options of ``lowbit consolidate``, read without torch."""

import argparse
from collections.abc import Sequence

from lightning_lowbit.cli.options import Parser, existing, output_file


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "lowbit consolidate",
        "runs/quickstart/version_0/checkpoints/last.ckpt",
        description="Makes one file of a checkpoint in shards, a folder that FSDP strategies write. All others load "
        "it. A folder may hold objects that run code: take those alone whose writer you trust.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="a checkpoint in shards")
    parser.add_argument("--output", metavar="FILE.ckpt", help="<folder>_whole.ckpt in the current folder by default")
    options = parser.parse_args(arguments)
    options.folder = existing(options.folder, "a checkpoint in shards, which is a folder")
    options.output = output_file(options.output, options.folder, "_whole.ckpt", "checkpoint, such as whole.ckpt")
    return options
