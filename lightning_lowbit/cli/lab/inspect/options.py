"""The options of ``lowbit inspect``, read without torch."""

import argparse
from collections.abc import Sequence
from typing import Any

import yaml

from lightning_lowbit.checks import choose
from lightning_lowbit.cli.arguments import PRESETS
from lightning_lowbit.cli.options import Parser, existing, output_file
from lightning_lowbit.cli.sources import table_keys

KINDS = "a Lightning .ckpt, a state_dict from torch.save, a .safetensors file, or a folder of transformers' weights"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "lowbit inspect",
        "runs/quickstart/version_0/checkpoints/last.ckpt --casts nvfp4,int4",
        description="Quantizes the weights of a checkpoint with some casts, and shows what that does to each of them. "
        "Every matrix is taken for a weight [out_features, in_features], those of embeddings included.",
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
    options = parser.parse_args(arguments)
    options.output = output_file(options.output, options.checkpoint, "_casts.png", "picture, such as casts.png")
    options.checkpoint = existing(options.checkpoint, KINDS)
    options.casts = cast_items(",".join(options.casts))
    return options


def cast_items(text: str) -> list[Any]:
    """Reads the items in ``--casts``; a ``ValueError`` if there are none, or for a preset that does not exist."""
    try:
        items = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        items = None
    if not items:
        example = "'nvfp4, {element: int4}'"
        raise ValueError(f"--casts takes presets and fields of casts, such as {example}; got {text!r}.")
    presets = table_keys(PRESETS)
    for item in items:
        if presets and isinstance(item, str):
            choose("preset", item, presets)
    return list(items)
