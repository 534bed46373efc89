"""The ``lowbit`` command: Lightning's command line with recipes by name.

    lowbit fit --config quickstart                       a recipe of the package
    lowbit fit --config quickstart --config bf16         an overlay on top of it
    lowbit fit --config mine.yaml --trainer.max_steps 50

Several ``--config`` merge into one before Lightning sees them: mappings key by key, lists of callbacks one after the
other, everything else by the last word.
"""

import difflib
import inspect
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from pydoc import locate
from typing import Any

import yaml
from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from lightning_lowbit.precision import LowBitPrecision

# What mistakes of the user raise: one line says what to do. Anything else keeps its traceback.
_USER_ERRORS = (ValueError, FileNotFoundError, MisconfigurationException, ArgumentError)

# Warnings that ask nothing of the user: Lightning 2.6.6 calls what torch 2.13 deprecates; text in memory needs no
# loader processes; a resumed run has a folder of its own.
_NOISE = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The '.*_dataloader' does not have many workers",
    r"The dirpath has changed from",
)


class SaveConfig(SaveConfigCallback):
    """Writes the resolved configuration once everything is set up, so that a failed start leaves no folder."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes."""
        super().setup(trainer, pl_module, "fit")


class LowBitCLI(LightningCLI):
    """Lightning's command line; checks what it can before anything is written."""

    def before_instantiate_classes(self) -> None:
        """Finds the checkpoint to go on from: one that is missing is an error, not a fresh start."""
        config = self.config[str(self.subcommand)]
        path = config.ckpt_path
        if path == "last":
            config.ckpt_path = str(find_last_checkpoint(self._checkpoint_folder(config.trainer)))
            print(f"Going on from {config.ckpt_path}")
        elif path not in (None, "best", "hpc") and not re.match(r"\w+:", path) and not Path(path).exists():
            raise FileNotFoundError(
                f"The checkpoint {config.ckpt_path!r} does not exist. Give the path of one, or leave --ckpt_path "
                "out to start afresh."
            )

    @staticmethod
    def _checkpoint_folder(trainer: Any) -> Path:
        # Where ModelCheckpoint writes: below the logger's folder, or the Trainer's.
        arguments = getattr(trainer.logger, "init_args", None) or {}
        folder = arguments.get("save_dir") or trainer.default_root_dir
        if folder is None:
            raise ValueError(
                "--ckpt_path last needs the folder of the run: set the logger's save_dir or trainer.default_root_dir, "
                "or give the path of a checkpoint."
            )
        return Path(folder)

    def before_fit(self) -> None:
        """Matches the plugin's patterns against the model."""
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, LowBitPrecision) and type(self.model).configure_model is LightningModule.configure_model:
            plugin.plan(self.model)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses; of what the parser has to say about a mistake, says one line."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            keys = {action.dest for sub in self._subcommand_parsers.values() for action in sub._actions}
            message = explain(error)
            raise ValueError(f"{message.rstrip('.')}. {suggest(message, keys)}".strip()) from error

    def _parse_ckpt_path(self) -> None:
        # Lightning would let the hyperparameters in a checkpoint override the configuration that is asked for.
        pass


def find_last_checkpoint(folder: Path) -> Path:
    """The newest ``last*.ckpt`` or ``interrupted.ckpt`` below a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [path for name in ("last*.ckpt", "interrupted.ckpt") for path in folder.rglob(name)]
    if not found:
        raise FileNotFoundError(
            f"--ckpt_path last: there is no last*.ckpt or interrupted.ckpt below {folder}. Give the path of a "
            "checkpoint, or leave --ckpt_path out to start afresh."
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def find_config(name: str) -> Path:
    """The file of a ``--config``: a path, or the name of a recipe of this package.

    Raises:
        FileNotFoundError: there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    recipes = {path.stem: path for path in Path(str(files("lightning_lowbit.recipes"))).glob("*.yaml")}
    if name not in recipes:
        close = difflib.get_close_matches(name, recipes, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise FileNotFoundError(
            f"--config {name}: no such file, and no such recipe.{hint} Recipes are: {', '.join(sorted(recipes))}."
        )
    return recipes[name]


def merge(base: Any, overlay: Any, key: str = "") -> Any:
    """Puts one configuration on top of another."""
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        other_class = "class_path" in overlay and overlay["class_path"] != base.get("class_path")
        if not other_class:
            shared = {name: merge(base[name], overlay[name], name) for name in base if name in overlay}
            return {**base, **overlay, **shared}
    if key == "callbacks" and isinstance(base, list) and isinstance(overlay, list):
        return base + overlay
    return overlay


def read_config(path: Path) -> dict[str, Any]:
    """A YAML file as a mapping.

    Raises:
        ValueError: it is not YAML, or no mapping.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}. Mend it there.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a mapping such as 'trainer: {{max_steps: 100}}'; got {config!r}.")
    return config


def merge_configs(arguments: Sequence[str], merged: Path) -> list[str]:
    """Replaces all ``--config`` of a command line by a single one, the file ``merged``, which this function writes."""
    rest: list[str] = []
    config: Any = {}
    remaining = iter(arguments)
    found = False
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option not in ("--config", "-c"):
            rest.append(argument)
            continue
        name = value if equals else next(remaining, "")
        config, found = merge(config, read_config(find_config(name))), True
    if not found:
        return rest
    merged.write_text(yaml.safe_dump(config))
    return [rest[0], "--config", str(merged), *rest[1:]] if rest else ["--config", str(merged)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status (after Ctrl-C in training, Lightning exits with status 1).

    With ``LOWBIT_TRACEBACK=1`` in the environment errors keep their traceback.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            for message in _NOISE:
                warnings.filterwarnings("ignore", message)
            arguments = merge_configs(arguments, Path(folder) / "merged.yaml")
            LowBitCLI(
                args=arguments,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,
                save_config_callback=SaveConfig,
                parser_kwargs={"prog": "lowbit", "exit_on_error": False}
                | {name: {"exit_on_error": False} for name in LightningCLI.subcommands()},
            )
    except _USER_ERRORS as error:
        if os.environ.get("LOWBIT_TRACEBACK") == "1":
            raise
        print(f"lowbit: error: {explain(error)} (LOWBIT_TRACEBACK=1 shows where.)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before or after training, where there is nothing to save
        print("lowbit: interrupted", file=sys.stderr)
        return 130
    return 0


def explain(error: BaseException) -> str:
    """The message of an error in one line.

    The parser tries every type that an argument may have and reports each attempt, indented. The first one is that of
    the class which the configuration names; the others are left out.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\s+", " ", _first_cause(lines)).strip() or type(error).__name__


def suggest(message: str, keys: Collection[str]) -> str:
    """What might have been meant where a message is about an unknown key; empty otherwise.

    Args:
        message: of the parser, from :func:`explain`.
        keys: what may stand on the command line.
    """
    misspelt = re.search(r"(?:Option '|accept option '|unrecognized arguments: -*)([\w.]+)", message)
    if misspelt is None:
        return ""
    named = re.findall(r"class_path '([\w.]+)'", message)
    if named:
        signatures = [inspect.signature(cls) for cls in inspect.getmro(locate(named[-1]))]  # type: ignore[arg-type]
        keys = {name for signature in signatures for name in signature.parameters}
    close = [
        match for word in (misspelt[1], misspelt[1].split(".")[0]) for match in difflib.get_close_matches(word, keys)
    ]
    return f"Did you mean {close[0]!r}?" if close else "`lowbit fit --help` lists what is possible."


def _first_cause(lines: list[str]) -> str:
    starts = [i for i, line in enumerate(lines) if line.strip() == "Errors:"]
    if not starts:
        return " ".join(lines)
    where = [line for line in lines[: starts[0]] if line.strip().endswith(":")]
    bullet, *others = lines[starts[0] + 1 :]
    indent = len(bullet) - len(bullet.lstrip())
    ends = [i for i, line in enumerate(others) if len(line) - len(line.lstrip()) <= indent]
    block = [bullet.replace("- ", "", 1), *others[: ends[0] if ends else None]]
    given = [line for line in others if "Given value:" in line and "Expected" in block[0]]
    return " ".join([*where, _first_cause(block), *given[:1]])


if __name__ == "__main__":
    sys.exit(main())
