"""Checks of a command line before torch is imported, so that mistakes are answered at once.

The parser of a run checks everything, and takes seconds to import. This module checks files, recipes, packages, and
options of Lightning's Trainer and of the classes that are named, with their values, as far as the sources of what is
installed tell them.
"""

import argparse
import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from lightning_lowbit.checks import near, nearest
from lightning_lowbit.cli.arguments import check_classes
from lightning_lowbit.cli.configs import (
    check_order,
    check_recipe,
    find_config,
    needs,
    read_recipe,
    recipes,
    split_configs,
)
from lightning_lowbit.cli.sources import Parameter, find_class, method_parameters
from lightning_lowbit.packages import install, is_installed

# Options beside those of the Trainer's method, and its arguments that are objects.
_OPTIONS = {"config", "c", "help", "h", "print_config", "seed_everything", "trainer", "model", "data"}
_OBJECTS = {"model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule"}
_SEED = ast.parse("int | bool", mode="eval").body  # as Lightning's command line declares it

_TYPES = {"int": "a whole number", "float": "a number"}

_NEEDS_NO_VALUE = re.compile(r"print_config|([\w.]+\.)?help")
_ALIASES = (None, "best", "hpc", "last", "last-good")  # of checkpoints


class Parser(argparse.ArgumentParser):
    """Parses the options of a command, ``prog``, which works with the arguments of the ``example``; a mistake is a
    ``ValueError``. Options are not abbreviated."""

    def __init__(self, prog: str, example: str, **settings: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **settings)
        self._example = f"{prog} {example}".strip()
        self._unknown: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = (argument.partition("=")[0] for argument in args or ())
        known = self._option_string_actions
        self._unknown = [option for option in options if option.startswith("--") and option not in known]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self._explain(message)} For example: {self._example}. `{self.prog} --help` tells more.")

    def _explain(self, message: str) -> str:
        """Says what is missing or wrong, from a message of argparse."""
        if self._unknown and message.startswith(("unrecognized arguments: -", "the following arguments are required")):
            option = self._unknown[0]
            return f"There is no option {option}.{nearest(option, sorted(self._option_string_actions))}"
        if missing := re.fullmatch("the following arguments are required: (.*)", message):
            return f"{self.prog} needs {' and '.join(map(self._described, missing[1].split(', ')))}."
        if unknown := re.fullmatch("unrecognized arguments: (.*)", message):
            return f"{self.prog} takes no further argument; got {unknown[1]!r}."
        if not (argument := re.fullmatch(r"argument ([^ :]+): (.*)", message, re.DOTALL)):
            return f"{message.rstrip('.').capitalize()}."
        option, problem = argument[1].rpartition("/")[2], argument[2]
        if problem == "expected one argument":
            return f"{option} takes a value, and none follows it."
        if choice := re.match("invalid choice: '(.*?)' ", problem):
            choices = [*(self._option_string_actions[option].choices or ())]
            return f"{option} has no {choice[1]!r}.{nearest(choice[1], choices)} Choose one of: {', '.join(choices)}."
        if value := re.fullmatch("invalid (.*) value: (.*)", problem):
            return f"{option} takes {_TYPES.get(value[1], 'other values')}; got {value[2]}."
        return f"{option} {problem.rstrip('.')}."  # of a type of ours

    def _described(self, name: str) -> str:
        """Names a missing argument with the words of its help."""
        actions = (action for action in self._actions if name in (action.dest, action.metavar, *action.option_strings))
        action = next(actions, None)
        about = re.split("[;,(]", str(action.help))[0].strip() if action is not None and action.help else ""
        name = name if name.startswith("-") else name.upper()
        return f"{name} ({about})" if about else name


def existing(name: str, kinds: str) -> Path:
    """Returns the path of a file or folder to read, else an ``OSError``; ``kinds`` says in words what it may be."""
    path = Path(name).expanduser()
    try:
        path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no {name}. Give {kinds}.") from None
    return path


def check_whole(path: Path) -> None:
    """Raises a ``ValueError`` for a checkpoint in shards, which only the strategy that saved it loads."""
    if (path / ".metadata").exists():
        command = f"lowbit consolidate {shlex.quote(str(path))}"
        raise ValueError(f"{path} is a sharded checkpoint. Give the file that `{command}` makes of it.")


def check_checkpoint(path: str | None) -> bool:
    """Returns whether ``--ckpt_path`` names a local file or folder, which must exist; False for aliases and URLs."""
    if path in _ALIASES or re.match(r"\w+:", str(path)):
        return False
    if not Path(str(path)).exists():
        raise FileNotFoundError(f"The checkpoint {path!r} does not exist. Give another path, or leave out --ckpt_path.")
    return True


def check_run(command: str, arguments: Sequence[str], shown: str = "") -> None:
    """Checks the arguments of a Trainer command, such as ``fit``; ``shown`` is the command that passes them on.

    Raises:
        FileNotFoundError: there is no such recipe or checkpoint.
        ValueError: as :func:`check_options`; nothing names a model, or a package of a recipe is not installed.
    """
    names, rest = split_configs(arguments)
    configs = {name: read_recipe(name) for name in names}
    check_recipe(names, [*configs.values()], [shown or command, *rest])
    check_order(names, [configs[name] for name in names])
    options = check_options(command, rest, configs)
    for name in names:
        packages, otherwise = needs(find_config(name))
        absent = [package for package in packages if not is_installed(package)]
        if absent and not (otherwise in options or any(_is_set(config, otherwise) for config in configs.values())):
            hint = f", or give --{otherwise}" if otherwise else ""
            raise ValueError(f"{name} needs packages that are not installed: {install(*absent)}{hint}.")
    check_checkpoint(options.get("ckpt_path"))


def check_options(
    command: str, arguments: Sequence[str], configs: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, str | None]:
    """Returns options by names without hyphens; None for one without a value. ``configs`` are contents by name.

    Raises:
        ValueError: an option of Lightning's command line or of a class does not exist, or takes no such value.
    """
    configs = configs or {}
    options: dict[str, str | None] = {}
    for i, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option.startswith("--"):
            after = arguments[i + 1] if i + 1 < len(arguments) else None
            is_value = after is not None and not after.startswith("--")
            options[option[2:].removesuffix("+")] = value if equals else after if is_value else None
    for option in options:
        _check_option(option, command)
        if options[option] is None and not _NEEDS_NO_VALUE.fullmatch(option):
            raise ValueError(f"--{option} takes a value, and none follows it.")
    for name, config in configs.items():
        trainer = config.get("trainer")
        if not isinstance(trainer, dict | str | None):
            raise ValueError(f"trainer in {name} takes a mapping such as {{max_steps: 100}}; got {trainer!r}.")
        for option in (*config, *(f"trainer.{key}" for key in (trainer if isinstance(trainer, dict) else ()))):
            _check_option(str(option), command, f" in {name}")
    _check_precision(options, [*configs.values()])
    check_classes(configs, options, _parameters(command))
    return options


def output_file(option: str | None, source: str, ending: str, what: str) -> Path:
    """Returns the path of a file that a command writes: of ``--output``, whose suffix must be that of the ``ending``
    (else a ``ValueError``), or of the ``source``'s name with the ending, in the current folder."""
    path = Path(option or f"{Path(source).resolve().stem}{ending}").expanduser()
    if path.suffix != Path(ending).suffix:
        raise ValueError(f"--output is the name of a {what}; got {option!r}.")
    return path


def _parameters(command: str) -> dict[str, Parameter]:
    """Returns the parameters of options that belong to no class of a configuration."""
    known = trainer_arguments()
    if not known:
        return {}
    trainer = {f"trainer.{name}": parameter for name, parameter in known["__init__"].items()}
    seed = known["__init__"]["max_steps"]._replace(annotation=_SEED, default=None)
    return known[command] | trainer | {"seed_everything": seed}


def refuse_unknown(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raises a ``ValueError`` for an option that neither ``lowbit fit`` has nor a command's own parser."""
    known = _first_names("fit")
    for argument in arguments:
        option = re.split("[=+]", argument.removeprefix("--"), maxsplit=1)[0]
        name = option.partition(".")[0]
        if argument.startswith("--") and known and name not in known:
            _refuse(option, name, [*vars(parser.parse_args([])), *sorted(known)], parser.prog)


def _first_names(command: str) -> set[str]:
    known = trainer_arguments()
    return _OPTIONS | (known[command].keys() - _OBJECTS) if known else set()


def _check_option(option: str, command: str, where: str = "") -> None:
    head, _, name = option.partition(".")
    known = trainer_arguments()
    if not known:
        return
    if head not in (tops := _first_names(command)):
        _refuse(option, head, sorted(tops), f"lowbit {command}", where)
    name = name.partition(".")[0]
    if head == "trainer" and name and name != "help" and name not in known["__init__"]:
        names = [f"trainer.{name}" for name in sorted(known["__init__"])]
        _refuse(option, f"trainer.{name}", names, f"lowbit {command}", where)


def _check_precision(options: Mapping[str, str | None], configs: Sequence[Mapping[str, Any]]) -> None:
    """Raises a ``ValueError`` for a precision of a plugin, and for one of Lightning beside a plugin."""
    precision = options.get("trainer.precision")
    if precision in (None, "null"):
        return
    overlay = precision.replace("-", "_")
    if overlay in recipes() and not re.match(r"(bf)?\d", precision):
        raise ValueError(
            f"--trainer.precision takes Lightning's own precisions, and {precision} is one of a plugin: give --config "
            f"{overlay} after the recipe, or --trainer.plugins.init_args.casts."
        )
    trainers = [trainer for config in configs if isinstance(trainer := config.get("trainer"), dict)]
    plugins = [trainer["plugins"] for trainer in trainers if "plugins" in trainer]
    if "trainer.plugins" not in options and plugins and plugins[-1] is not None:
        raise ValueError(
            f"--trainer.precision {precision} contradicts the plugin of the recipe: leave it out: the plugin's "
            "compute_dtype (--trainer.plugins.init_args.compute_dtype bf16) is of all that it does not quantize."
        )


def _refuse(option: str, part: str, known: Sequence[str], command: str, where: str = "") -> None:
    close = near(part, [*known, "model.optimizer", "model.scheduler"])  # LightningCLI has its own beside the model
    hint = (
        f"Did you mean {('' if where else '--') + close[0] + option.removeprefix(part)!r}?"
        if close
        else f"`{command} --help` lists some."
    )
    raise ValueError(f"There is no option --{option}{where}. {hint}")


def _is_set(config: Any, option: str) -> bool:
    for part in option.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config is not None


@cache
def trainer_arguments() -> dict[str, dict[str, Parameter]]:
    """Reads the parameters of the Trainer's methods by name; empty if its source is not where it is expected."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        trainer = find_class(f"{package}.trainer.trainer.Trainer")
        if trainer is None:
            continue
        functions = [item for item in trainer.node.body if isinstance(item, ast.FunctionDef)]
        methods = {method.name: method_parameters(method, trainer.module) for method in functions}
        if {"__init__", "fit", "validate", "test", "predict"} <= methods.keys():
            return methods
    return {}
