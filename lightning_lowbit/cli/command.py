"""Dispatches the ``lowbit`` commands and turns mistakes into one-line messages.

Imports inside functions keep ``lowbit ls`` quick: it needs neither torch nor Lightning.
"""

import logging
import os
import re
import select
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path

from lightning_lowbit.checks import nearest
from lightning_lowbit.cli.configs import OVERLAY, STUDY, find_config, headline, kind, needs, recipes
from lightning_lowbit.cli.mistakes import explain, hidden, is_of_a_path, lost_process
from lightning_lowbit.cli.options import Parser, check_run, existing, output_file
from lightning_lowbit.packages import install_extra, is_installed
from lightning_lowbit.signals import handle

_USAGE = """\
usage: lowbit COMMAND ...

To begin: lowbit fit --config quickstart

  ls                         lists recipes, overlays and studies
  cp NAME [FILE]             copies a recipe, to change it
  fit --config RECIPE [--config OVERLAY ...] [--any.argument VALUE ...]
  validate                   the same with a checkpoint: --ckpt_path last
  test, predict              for modules and data that have test_step or predict_step
  compare --config RECIPE --vary A,B [--vary C,D ...] [--seeds 0,1,2] [--lr 1e-3,3e-4]
                             runs all combinations and tabulates them
  compare --study STUDY      the same for the rows of a study
  compare --from STUDY.json  draws its table, pictures and page again, without the runs
  inspect CHECKPOINT --casts A,B
                             what casts make of its weights: a table and a picture
  export CHECKPOINT --format FORMAT --output DIR
                             a checkpoint as inference engines load it, with the outputs of the training
  consolidate FOLDER         one file of a checkpoint in shards
  estimate --config RECIPE [--device h100] [--devices N] [--strategy ddp|fsdp] [--tensor_parallel T]
                             memory and time of a step by formulas, before there are devices
  evaluate CHECKPOINT|FOLDER --tasks A,B
                             scores a trained or exported model by lm-evaluation-harness

RECIPE, OVERLAY and STUDY are names from `lowbit ls` or YAML files. `lowbit COMMAND --help` tells more,
`lowbit --version` the version.
"""

_OPTIONS = """\
  --config OVERLAY                               what changes a recipe, on top of it (repeat); `lowbit ls` lists them
  --trainer.max_steps 1000                       optimizer steps
  --trainer.devices 2                            how many
  --trainer.default_root_dir FOLDER              where the runs go; runs/<names> by default
  --trainer.plugins.init_args.casts mxfp4        a preset, or fields of casts
  --trainer.plugins.init_args.skip lm_head       layers to leave in high precision
  --model.init_args.network llama-60m            and --model.init_args.config.num_hidden_layers 2
  --model.init_args.optimizer.init_args.lr 3e-4  and the other options of the optimizer
  --data.init_args.path ~/texts                  your own text; --data.init_args.batch_size, sequence_length
  --seed_everything 1                            weights, data and stochastic rounding
  --ckpt_path last                               resumes from the newest checkpoint of the run's folder
"""

# The subcommands of Lightning's command line.
TRAINER_COMMANDS = ("fit", "validate", "test", "predict")

# The rooms of the other commands, and the packages that they need beside jsonargparse, which reads configurations.
# ``options`` of a room answers mistakes at once; ``command`` imports torch.
_ROOMS = {
    "compare": ("lab.compare", "matplotlib", "scipy"),
    "inspect": ("lab.inspect", "safetensors"),
    "export": ("export",),
    "evaluate": ("evaluate",),
    "estimate": ("lab.estimate",),
}


_TOLD: set[str] = set()  # messages of the Hub's client, without numbers


def main(arguments: list[str]) -> int:
    logging.getLogger("huggingface_hub.utils._http").addFilter(_is_first)
    try:
        with _ended_by_sigterm():
            status = _dispatch(arguments)
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:  # before or after training, where there is nothing to save
        print("lowbit: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 141  # the status of a program that SIGPIPE ends
        lost = lost_process(error)
        if os.environ.get("LOWBIT_TRACEBACK") == "1" or not (lost or _is_mistake(error)):
            raise
        message = lost or explain(error)
        where = " (LOWBIT_TRACEBACK=1 shows where.)" if "torch" in sys.modules else ""  # else it is the command line
        print(f"lowbit: error: {message}{hidden(message)}{where}", file=sys.stderr)
        return 1 if lost else 2


def _is_first(record: logging.LogRecord) -> bool:
    """Lets the Hub's client tell once that a request fails, and once that it tries again: an error follows the last."""
    text = re.sub(r"\d+", "", record.getMessage())
    is_first = text not in _TOLD
    _TOLD.add(text)
    return is_first


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the process with a line, unless others handle it: Lightning while it trains, and ``compare``.

    No exception does it, since some imports swallow any.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others may not install handlers
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        if signal.getsignal(number) is not end:  # Lightning's handler calls the one before it
            return
        os.write(2, b"lowbit: ended by SIGTERM\n")
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    handle(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"lightning_lowbit {metadata.version('lightning_lowbit')}")
        return 0
    name, *rest = arguments
    commands: dict[str, Callable[[Sequence[str]], None]] = {"ls": _list, "cp": _copy, "consolidate": _consolidate}
    if name in commands:
        commands[name](rest)
        return 0
    if name not in (names := [*commands, *_ROOMS, *TRAINER_COMMANDS]):
        raise ValueError(f"There is no command {name!r}.{nearest(name, names)} Commands are: {', '.join(names)}.")
    room, *packages = _ROOMS.get(name, ("",))
    if missing := [package for package in ("jsonargparse", *packages) if not is_installed(package)]:
        raise ValueError(f"`lowbit {name}` needs {' and '.join(missing)}: {install_extra('jsonargparse')}.")
    if room:
        options = import_module(f"lightning_lowbit.cli.{room}.options").parse(rest)
        return getattr(import_module(f"lightning_lowbit.cli.{room}.command"), name)(options) or 0
    place = next((i for i, argument in enumerate(rest) if argument in ("-h", "--help")), None)
    if place is not None and rest[place + 1 : place + 2] != ["all"]:
        print(_short_help(name))
        return 0
    if place is not None:
        rest[place : place + 2] = ["--help"]
    check_run(name, rest)
    import_module("lightning_lowbit.cli.run").run([name, *rest])
    return 0


def _is_mistake(error: Exception) -> bool:
    if isinstance(error, ValueError | OSError):
        return True
    from jsonargparse import ArgumentError

    from lightning_lowbit._lightning import MisconfigurationException

    return is_of_a_path(error) or isinstance(error, MisconfigurationException | ArgumentError)


def _reader_is_gone() -> bool:
    """Tells whether the reader of the output has closed its pipe, as ``head`` does; then output goes to /dev/null."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    is_closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed


def _short_help(command: str) -> str:
    names = [name for name, path in recipes().items() if not kind(path)]
    width = max(map(len, names))
    return "\n".join(
        [
            f"usage: lowbit {command} --config RECIPE [--config OVERLAY ...] [--any.argument VALUE ...]\n\nRecipes:",
            *(f"  {name:{width}}  {headline(recipes()[name])}" for name in names),
            f"\nWhat is often changed:\n{_OPTIONS}",
            "`lowbit cp quickstart mine.yaml` copies a recipe, to change more. "
            f"`lowbit {command} --help all` shows all arguments,",
            f"`lowbit {command} --trainer.callbacks.help lightning_lowbit.RunReport` those of a class.",
        ]
    )


def _list(arguments: Sequence[str]) -> None:
    """Prints each recipe, overlay and study with one line on what it is."""
    Parser("lowbit ls", "", description=_list.__doc__).parse_args(arguments)
    titles = {"": "Recipes", OVERLAY: "Overlays, for a second --config", STUDY: "Studies, for `lowbit compare --study`"}
    for mark, title in titles.items():
        group = {name: headline(path) + _packages(path) for name, path in recipes().items() if kind(path) == mark}
        width = max(map(len, group), default=0)
        print("\n".join([f"{title}:", *(f"  {name:{width}}  {line}" for name, line in group.items())]))


def _packages(path: Path) -> str:
    packages, _ = needs(path)
    mark = "" if all(map(is_installed, packages)) else ": not installed"
    return f" [{' '.join(packages)}{mark}]" if packages else ""


def _copy(arguments: Sequence[str]) -> None:
    """Copies a recipe, overlay or study to a file, to change it."""
    parser = Parser("lowbit cp", "quickstart mine.yaml", description=_copy.__doc__)
    parser.add_argument("name", help="a name from `lowbit ls`")
    parser.add_argument("file", nargs="?", default=".", help="where to; a folder keeps the name")
    options = parser.parse_args(arguments)
    config = find_config(options.name, "lowbit cp")
    target = Path(options.file).expanduser()
    if target.is_dir() or options.file.endswith("/"):
        target /= config.name
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already; give another name, or remove it first.")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(config.read_text())
    use = "compare --study" if kind(config) == STUDY else "fit --config"
    print(f"Copied to {target}, for `lowbit {use} {shlex.quote(str(target))}`")


def _consolidate(arguments: Sequence[str]) -> None:
    """Makes one file of a checkpoint in shards, a folder that FSDP strategies write. All others load it. A folder may
    hold objects that run code: take those alone whose writer you trust."""
    example = "runs/quickstart/version_0/checkpoints/last.ckpt"
    parser = Parser("lowbit consolidate", example, description=_consolidate.__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="a checkpoint in shards")
    parser.add_argument("--output", metavar="FILE.ckpt", help="<folder>_whole.ckpt in the current folder by default")
    options = parser.parse_args(arguments)
    folder = existing(options.folder, "a checkpoint in shards, which is a folder")
    output = output_file(options.output, options.folder, "_whole.ckpt", "checkpoint, such as whole.ckpt")
    import_module("lightning_lowbit.precision.checkpoints.files").consolidate(folder, output)
    print(f"Written to {output}")
