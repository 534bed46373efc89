"""``lowbit export``: a checkpoint in a format that inference engines load."""

import signal
from argparse import Namespace
from types import FrameType

from lightning_lowbit.export.card import layers_table
from lightning_lowbit.export.checkpoint import explain_formats, export_checkpoint
from lightning_lowbit.export.trained_model import read


def export(options: Namespace) -> None:
    if options.format is None:
        explanation = explain_formats(read(options.checkpoint, options.module))
        print(f"{explanation} `lowbit export --help` describes them.")
        return
    signal.signal(signal.SIGTERM, _interrupt)  # so that nothing is left behind
    exported = export_checkpoint(**vars(options))
    total, few = exported.parameters
    print(layers_table(exported))
    print(f"\n{few:,} of {total:,} parameters in few bits, {exported.bytes:,} bytes on disk.")
    print(exported.compared())
    print(f"Exported to {exported.folder}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
