"""``lowbit fit | validate | test | predict``: Lightning's command line with recipes by name."""

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_lowbit.callbacks.graceful_interrupt import TERMINATED
from lightning_lowbit.cli.checkpoints import resolve
from lightning_lowbit.cli.configs import as_list, merge_configs
from lightning_lowbit.cli.mistakes import explain, suggest
from lightning_lowbit.precision import LowBitPrecision

# Warnings that ask nothing of the user: Lightning 2.6.6 calls what torch 2.13 deprecates; text in memory needs no
# loader processes; a resumed run has a folder of its own.
_NOISE = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The '.*_dataloader' does not have many workers",
    r"The dirpath has changed from",
)

_CLI = TypeVar("_CLI", bound="LowBitCLI")


def run(arguments: Sequence[str]) -> None:
    """Runs a subcommand of Lightning's command line; all ``--config`` are merged before it sees them."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        for message in _NOISE:
            warnings.filterwarnings("ignore", message)
        try:
            _make(LowBitCLI, merge_configs(arguments, Path(folder) / "merged.yaml"))
        except SIGTERMException as stopped:  # to which Lightning gives no status: a scheduler would take it for the end
            if stopped.code is None and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
                raise SystemExit(TERMINATED) from stopped
            raise


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
        """Gives the run its logger, and finds the checkpoint to go on from: a missing or damaged one is an error."""
        config = self.config[str(self.subcommand)]
        folder = config.trainer.default_root_dir
        if config.trainer.logger in (None, True) and folder is not None:
            # Lightning's own default would put the versions into a folder "lightning_logs" below this one.
            config.trainer.logger = Namespace(  # type: ignore[no-untyped-call]
                class_path="lightning.pytorch.loggers.TensorBoardLogger",
                init_args=Namespace(save_dir=str(folder), name=None),  # type: ignore[no-untyped-call]
            )
        config.ckpt_path = resolve(config.ckpt_path, config.trainer, trains=self.subcommand == "fit")

    def before_fit(self) -> None:
        """Matches the plugin's patterns against the model, unless its layers are still to be made."""
        plugin, model = self.trainer.precision_plugin, type(self.model)
        makes_later = model.configure_model is not LightningModule.configure_model
        if isinstance(plugin, LowBitPrecision) and (getattr(model, "makes_layers_at_once", False) or not makes_later):
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


def check(arguments: Sequence[str]) -> None:
    """Parses what :func:`run` would run, and makes nothing of it but the plugin.

    Raises:
        ValueError: an argument, a key of a configuration or a cast is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        merged = merge_configs(arguments, Path(folder) / "merged.yaml")
        _make(_Parsed, merged)


def make_on_meta(arguments: Sequence[str]) -> "OnMeta":
    """Makes the model, the data module and the plugin of :func:`run`, without memory for numbers and without a Trainer.

    Raises:
        ValueError: an argument, a key of a configuration or a cast is wrong.
    """
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        return _make(OnMeta, merge_configs(arguments, Path(folder) / "merged.yaml"))


def _make(kind: type[_CLI], arguments: list[str]) -> _CLI:
    return kind(
        args=arguments,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_callback=SaveConfig,
        save_config_kwargs={"overwrite": True},  # without a logger all runs share a folder
        parser_kwargs={"prog": "lowbit", "exit_on_error": False}
        | {name: {"exit_on_error": False} for name in LightningCLI.subcommands()},
    )


class _Parsed(LowBitCLI):
    """Parses and stops there."""

    def _set_seed(self) -> None:
        pass

    def before_instantiate_classes(self) -> None:
        """Nothing."""

    def instantiate_classes(self) -> None:
        """Makes the plugin: to the parser casts are any mapping."""
        name = str(self.subcommand)
        plugins = Namespace(plugins=self.config[name].trainer.plugins)  # type: ignore[no-untyped-call]
        self._subcommand_parsers[name].instantiate(Namespace(trainer=plugins))  # type: ignore[no-untyped-call]

    def _run_subcommand(self, subcommand: str) -> None:
        pass


class OnMeta(_Parsed):
    """Makes what a run is made of, but no Trainer, which would look for devices."""

    def instantiate_classes(self) -> None:
        """Makes them: attributes ``model``, ``datamodule`` (or None) and ``plugins``."""
        name = str(self.subcommand)
        config = self.config[name]
        trainer = Namespace(plugins=config.trainer.plugins)  # type: ignore[no-untyped-call]
        wanted = Namespace(model=config.model, data=config.data, trainer=trainer)  # type: ignore[no-untyped-call]
        made = self._subcommand_parsers[name].instantiate(wanted)
        self.model, self.datamodule = made.model, made.get("data")
        self.plugins: list[Any] = as_list(made.trainer.plugins or [])
