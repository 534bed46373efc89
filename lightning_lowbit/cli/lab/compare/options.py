"""The options of ``lowbit compare``, read without torch."""

import argparse
from collections.abc import Mapping, Sequence

from lightning_lowbit.checks import integer
from lightning_lowbit.cli.configs import find_config
from lightning_lowbit.cli.options import Parser, check_options, check_run, existing, refuse_unknown


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options, with those of ``lowbit fit`` in ``rest`` and all of them in ``arguments``."""
    parser = Parser(
        "lowbit compare",
        "--config quickstart --vary bf16,nvfp4",
        description="Runs a recipe with each combination of overlays, learning rates and seeds, or the rows of a "
        "study, and tabulates them. Other arguments are those of `lowbit fit`, and go to every run.",
    )
    add = parser.add_argument
    add("--study", metavar="STUDY", help="a study of `lowbit ls`, or its file, instead of --config, --vary and --lr")
    add("--config", "-c", action="append", help="a recipe, or one and overlays for all rows (repeat)")
    vary = (
        "overlays, one of which each row takes; 'A+B' are two together, 'none' is none; of several --vary all "
        "combinations (repeat)"
    )
    add("--vary", action="append", default=[], type=_names, metavar="A,B", help=vary)
    add("--lr", type=_names, default=[], metavar="1e-3,3e-4", help="learning rates; the recipe's by default")
    add("--seeds", type=_numbers, metavar="0,1,2", help="seeds; by default those of the study, or 0")
    add("--baseline", help="the row that gaps are relative to; by default that of the study, or the first")
    add("--output", help="folder of the runs; runs/compare by default, runs/studies with --study")
    again = "draws table, pictures and page again from the record of a study, into --output or the folder of the file"
    add("--from", dest="record", metavar="STUDY.json", help=again)
    add("--jobs", type=int, default=1, help="runs at a time")
    pilot = "runs only the first two seeds of two rows of an expected effect; says how many seeds all effects need"
    add("--pilot", action="store_true", help=pilot)
    add("--dry_run", action="store_true", help="only says what would run")
    options, rest = parser.parse_known_args(arguments)
    integer("--jobs", options.jobs, 1, "the number of runs at a time")
    if options.record is not None:
        _check_record(options, rest, vars(parser.parse_args([])))
        options.record = existing(options.record, "the STUDY.json that `lowbit compare` wrote")
    elif options.study is not None:
        if others := [f"--{name}" for name in ("config", "vary", "lr") if getattr(options, name)]:
            names = " and ".join(others)
            raise ValueError(f"A study has its own recipe and rows: leave out {names}, or change a copy (`lowbit cp`).")
        find_config(options.study, "--study")
        refuse_unknown(rest, parser)
        check_options("fit", rest)
    else:
        _check_recipe(options, rest, parser)
    options.rest, options.arguments = rest, list(arguments)
    return options


def _check_record(options: argparse.Namespace, rest: Sequence[str], usual: Mapping[str, object]) -> None:
    names = [name for name, value in vars(options).items() if name not in ("record", "output") and value != usual[name]]
    if others := [*(f"--{name}" for name in names), *rest]:
        raise ValueError(f"--from draws what has run, and takes --output alone: leave out {' and '.join(others)}.")


def _check_recipe(options: argparse.Namespace, rest: Sequence[str], parser: Parser) -> None:
    if not options.config:
        raise ValueError("--config names the recipe to run, or --study a study; see `lowbit ls`. Give one of them.")
    if options.lr and any("optimizer" in argument and ".lr" in argument for argument in rest):
        raise ValueError("--lr and an argument that sets the optimizer's lr contradict each other: leave one out.")
    refuse_unknown(rest, parser)
    first = [items[:1] for items in options.vary]
    # Not all combinations: each overlay once, with the first ones of the other lists.
    rows = [[*first[:i], [text], *first[i + 1 :]] for i, items in enumerate(options.vary) for text in items]
    for row in rows or [[]]:
        overlays = [name for items in row for text in items for name in text.split("+") if name != "none"]
        configs = (f"--config={name}" for name in (*options.config, *overlays))
        check_run("fit", [*configs, *rest], shown="compare")


def _names(text: str) -> list[str]:
    return [*filter(None, text.split(","))]


def _numbers(text: str) -> list[int]:
    try:
        return [*map(int, _names(text))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes whole numbers such as 0,1,2; got {text!r}") from None
