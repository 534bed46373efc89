"""The options of ``lowbit export``, read without torch."""

import argparse
from collections.abc import Sequence

from lightning_lowbit.checks import integer
from lightning_lowbit.cli.options import Parser, existing
from lightning_lowbit.export.formats.names import ABOUT, DTYPES


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    width = max(map(len, ABOUT))
    formats = "\n".join(f"  {name:{width}}  {about}" for name, about in ABOUT.items())
    parser = Parser(
        "lowbit export",
        "runs/quickstart/version_0/checkpoints/last.ckpt --format nvfp4-w4a16 --output exported --rescale",
        description="Exports a checkpoint with the codes and scales of its training, loads the result by the format's "
        "own client, and compares outputs.",
        epilog=f"formats:\n{formats}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", help="a .ckpt of a run with a plugin of lightning_lowbit; it tells its casts")
    add("--format", choices=ABOUT, metavar="NAME", help="see below; without it, those that fit are listed")
    add("--output", metavar="DIR", help="the folder to make")
    add("--calibrate", metavar="FILE", help="text over which scales of activations are measured and outputs compared")
    add(
        "--tokenizer", metavar="NAME", help="'bytes', a folder, or a name on the Hugging Face Hub; else that of the run"
    )
    add("--dtype", choices=DTYPES, help="of tensors that are not quantized; bf16, or what the format takes, by default")
    add("--shape", type=_sizes, metavar="2,3,32,32", help="of an input of a model that takes no tokens, for onnx")
    add("--rescale", action="store_true", help="rounds scales, or shares them, where an engine needs others")
    add("--module", metavar="CLASS", help="package.module.Class of your own LightningModule; its code runs")
    add("--merge", action="store_true", help="adds adapters to the weights, and rounds the sums to few bits")
    add("--license", metavar="NAME", help="of the model, for its card: apache-2.0; else that of the base's card")
    add("--overwrite", action="store_true", help="replaces DIR if an export wrote it")
    add("--no-parity", dest="parity", action="store_false", help="does not load and compare the result")
    options = parser.parse_args(arguments)
    if options.format is not None and options.output is None:
        raise ValueError(f"--format {options.format} needs --output, the folder to make: --output my-{options.format}.")
    options.checkpoint = existing(options.checkpoint, "a checkpoint (.ckpt) of a run with a plugin of lightning_lowbit")
    return options


def _sizes(text: str) -> list[int]:
    try:
        return [integer("--shape", int(size), 1) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes sizes such as 2,3,32,32; got {text!r}") from None
