"""The options of ``lowbit inspect``, read without torch."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_lowbit.cli.options import existing

KINDS = "a Lightning .ckpt, a state_dict from torch.save, a .safetensors file, or a folder of transformers' weights"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    options = _parser().parse_args(arguments)
    name = options.output
    options.output = Path(name or f"{Path(options.checkpoint).resolve().stem}_casts.png").expanduser()
    if options.output.suffix != ".png":
        raise ValueError(f"--output is the name of a picture, such as casts.png; got {name!r}.")
    options.checkpoint = existing(options.checkpoint, KINDS)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lowbit inspect",
        description="Quantizes the weights of a checkpoint with some casts, and shows what that does to each of them. "
        "Every matrix is taken for a weight [out_features, in_features], those of embeddings included.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoint", help=KINDS)
    casts = (
        "presets, of which the cast of weights in the forward pass (fprop_w) is taken, or fields of a cast in YAML: "
        "'nvfp4, {element: int4, scale: {format: fp32, block: 128}}' (repeat)"
    )
    only = (
        "weights to look at: a regular expression that matches a name or whole parts of it between dots, as skip and "
        "only of the precision plugin do (repeat)"
    )
    transposed = (
        "weights that are stored as [in_features, out_features]: those of transformers' Conv1D, "
        "'c_attn|c_proj|c_fc' in GPT-2 (repeat)"
    )
    add("--casts", required=True, action="append", metavar="A,B", help=casts)
    add("--only", action="append", default=[], metavar="PATTERN", help=only)
    add("--transposed", action="append", default=[], metavar="PATTERN", help=transposed)
    add("--output", metavar="FILE.png", help="the picture; <checkpoint>_casts.png in the current folder by default")
    return parser
