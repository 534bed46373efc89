"""Which command does what, and how mistakes are told."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jsonargparse import ArgumentError

from lightning_lowbit._lightning import MisconfigurationException
from lightning_lowbit.cli.compare import compare
from lightning_lowbit.cli.configs import OVERLAY, STUDY, find_config, headline, kind, recipes
from lightning_lowbit.cli.estimate import estimate
from lightning_lowbit.cli.inspect import inspect
from lightning_lowbit.cli.mistakes import explain
from lightning_lowbit.cli.run import LowBitCLI, run
from lightning_lowbit.quant.cast import nearest

# What mistakes of the user raise: one line says what to do. Anything else keeps its traceback.
_USER_ERRORS = (ValueError, OSError, MisconfigurationException, ArgumentError)

_USAGE = """\
usage: lowbit COMMAND ...

  ls                         lists recipes, overlays and studies
  cp NAME [FILE]             copies a recipe, to change it
  fit --config RECIPE [--config OVERLAY ...] [--any.argument VALUE ...]
  validate                   the same with a checkpoint: --ckpt_path last
  test, predict              for modules and data that have test_step or predict_step
  compare --config RECIPE --vary A,B [--vary C,D ...] [--seeds 0,1,2] [--lr 1e-3,3e-4]
                             runs all combinations and tabulates them
  compare --study STUDY      the same for the rows of a study
  inspect CHECKPOINT --casts A,B
                             what casts make of its weights: a table and a picture
  estimate --config RECIPE [--device h100] [--devices N] [--strategy ddp|fsdp] [--tensor_parallel T]
                             memory and time of a step by formulas, before there are devices

RECIPE, OVERLAY and STUDY are names from `lowbit ls` or YAML files. `lowbit COMMAND --help` tells more.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status (after Ctrl-C in training, Lightning exits with status 1).

    With ``LOWBIT_TRACEBACK=1`` in the environment errors keep their traceback.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    own: dict[str, Callable[[Sequence[str]], int | None]] = {
        "ls": _list,
        "cp": _copy,
        "compare": compare,
        "inspect": inspect,
        "estimate": estimate,
    }
    commands = [*own, *LowBitCLI.subcommands()]
    if "" not in sys.path:  # a configuration may name classes of the current folder, as with `python -m`
        sys.path.insert(0, "")
    try:
        if arguments[0] not in commands:
            hint = nearest(arguments[0], commands)
            raise ValueError(f"There is no command {arguments[0]!r}.{hint} Commands are: {', '.join(commands)}.")
        if arguments[0] in own:
            return own[arguments[0]](arguments[1:]) or 0
        run(arguments)
    except _USER_ERRORS as error:
        if os.environ.get("LOWBIT_TRACEBACK") == "1":
            raise
        print(f"lowbit: error: {explain(error)} (LOWBIT_TRACEBACK=1 shows where.)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before or after training, where there is nothing to save
        print("lowbit: interrupted", file=sys.stderr)
        return 130
    return 0


def _list(arguments: Sequence[str]) -> None:
    """Prints each recipe, overlay and study with one line on what it is."""
    argparse.ArgumentParser("lowbit ls", description=_list.__doc__).parse_args(arguments)
    titles = {"": "Recipes", OVERLAY: "Overlays, for a second --config", STUDY: "Studies, for `lowbit compare --study`"}
    for mark, title in titles.items():
        group = {name: headline(path).removeprefix(mark) for name, path in recipes().items() if kind(path) == mark}
        width = max(map(len, group), default=0)
        print("\n".join([f"{title}:", *(f"  {name:{width}}  {line}" for name, line in group.items())]))


def _copy(arguments: Sequence[str]) -> None:
    """Copies a recipe, overlay or study to a file, to change it."""
    parser = argparse.ArgumentParser("lowbit cp", description=_copy.__doc__)
    parser.add_argument("name", help="a name from `lowbit ls`")
    parser.add_argument("file", nargs="?", default=".", help="where to; a folder keeps the name")
    given = parser.parse_args(arguments)
    source = find_config(given.name)
    target = Path(given.file).expanduser()
    if target.is_dir() or given.file.endswith("/"):
        target /= source.name
    if target.exists():
        raise ValueError(f"{target} exists already; give another name, or remove it first.")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source.read_text())
    use = "compare --study" if kind(source) == STUDY else "fit --config"
    print(f"Copied to {target}, for `lowbit {use} {target}`")
