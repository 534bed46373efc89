"""The commands ``fit``, ``validate``, ``test`` and ``predict``: Lightning's command line with recipes by name."""

import math
import re
import tempfile
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten
from traceback import walk_tb
from typing import Any, TypeVar

import torch
import yaml
from jsonargparse import ArgumentError, Namespace

import lightning_lowbit.callbacks  # registers short names of classes, as do the next two
import lightning_lowbit.optim
import lightning_lowbit.precision.grad_scalers  # noqa: F401
from lightning_lowbit._lightning import (
    NAME,
    BasePredictionWriter,
    LightningArgumentParser,
    LightningCLI,
    LightningModule,
    SaveConfigCallback,
    SIGTERMException,
    Trainer,
    rank_zero_only,
    take_versions,
)
from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.callbacks.recovery.graceful_interrupt import TERMINATED
from lightning_lowbit.checks import is_number, positive, some
from lightning_lowbit.cli.checkpoints import OBJECTS, as_trained, resolve
from lightning_lowbit.cli.configs import as_list, merge_configs
from lightning_lowbit.cli.mistakes import explain, option_of, suggest
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.checkpoints.files import load_checkpoint

# Warnings that ask nothing of users: Lightning 2.6.6 uses a function that torch 2.13 deprecates; text in memory needs
# no loader processes; a resumed run has its own folder.
_NOISE = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The '.*_dataloader' does not have many workers",
    r"The dirpath has changed from",
)

# Lightning divides by these and does not check them: 0 ends a run in its middle, and below 0 the loss would rise.
_DIVISORS = {
    "accumulate_grad_batches": "a number of batches",
    "check_val_every_n_epoch": "a number of epochs",
    "val_check_interval": "a number of batches, or a share of an epoch",
}

_NO_EVENTS = 100  # bytes of TensorBoard's file, with its head alone

_LOADING = {"load_model_state_dict", "load_optimizer_state_dict"}  # methods of Lightning's strategies

_STRICT = {"exit_on_error": False, "allow_abbrev": False}

_CLI = TypeVar("_CLI", bound="LowBitCLI")


def run(arguments: Sequence[str]) -> None:
    with warnings.catch_warnings():
        for message in _NOISE:
            warnings.filterwarnings("ignore", message)
        try:
            _make(LowBitCLI, arguments)
        except SIGTERMException as stopped:  # without an exit status a job scheduler would see success
            if stopped.code is None and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
                raise SystemExit(TERMINATED) from stopped
            raise


class SaveConfig(SaveConfigCallback):
    """Writes the resolved configuration when training starts, so that a failed start leaves no folder."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None: ...

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = trainer.log_dir  # all processes ask for it together
        if folder is None or "://" in folder:
            super().setup(trainer, pl_module, "fit")
        elif trainer.is_global_zero:
            options = getattr(trainer.precision_plugin, "overridden", ())
            head = "The checkpoint that this run resumed from holds other options, and they were in force:"
            comment = "".join(f"# {line}\n" for line in (head, *options)) if options else ""
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder) / self.config_filename
            replace_file(path, comment + self.parser.dump(self.config, skip_none=False, skip_validation=True))


class LowBitCLI(LightningCLI):
    """Lightning's command line, with checks before anything is written."""

    def __init__(self, args: list[str], **kwargs: Any) -> None:
        self._command, *self._arguments = args
        super().__init__(args=args, **kwargs)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        if subcommand == self._command:
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        return self.init_parser(**kwargs)  # one without arguments, which take long to add

    def before_instantiate_classes(self) -> None:
        config = self.config[str(self.subcommand)]
        folder = config.trainer.default_root_dir
        if config.trainer.logger in (None, True) and folder is not None:
            # Lightning's own default would put the versions into a folder "lightning_logs" below this one.
            config.trainer.logger = Namespace(  # type: ignore[no-untyped-call]
                class_path=f"{NAME}.loggers.TensorBoardLogger",
                init_args=Namespace(save_dir=str(folder), name=None),  # type: ignore[no-untyped-call]
            )
        config.ckpt_path = resolve(config.ckpt_path, config.trainer, trains=self.subcommand == "fit")

    def before_fit(self) -> None:
        plugin, model = self.trainer.precision_plugin, type(self.model)
        makes_later = model.configure_model is not LightningModule.configure_model
        if isinstance(plugin, LowBitPrecision) and (getattr(model, "makes_layers_at_once", False) or not makes_later):
            plugin.plan(self.model)

    def before_validate(self) -> None:
        if self.trainer.is_global_zero:
            subcommand, plugin = str(self.subcommand), self.trainer.precision_plugin
            weights = self.config[subcommand].ckpt_path or "the model as it is made, without --ckpt_path"
            precision = plugin if isinstance(plugin, LowBitPrecision) else plugin.precision
            print(f"lowbit {subcommand}: {weights}, in {precision}")

    before_test = before_predict = before_validate

    def after_predict(self) -> None:
        trainer = self.trainer
        if trainer.is_global_zero:
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            writers = [type(one).__name__ for one in callbacks if isinstance(one, BasePredictionWriter)]
            where = "what predict_step returns is not kept: give trainer.callbacks a BasePredictionWriter, to write it"
            where = f"{some(writers)} got what predict_step returns" if writers else where
            print(f"lowbit predict: {trainer.predict_loop.batch_progress.total.completed} batches; {where}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[str(self.subcommand)]
        if self.subcommand != "fit":
            weights_only = config.get("weights_only") is not False
            kwargs = as_trained(config.trainer, config.ckpt_path, self._arguments, weights_only) | kwargs
        try:
            return super().instantiate_trainer(**kwargs)
        except (ImportError, TypeError) as error:  # of Lightning, which refuses some options so
            raise ValueError(f"The Trainer cannot be made: {error}") from error
        except RuntimeError as error:
            if (second := re.search(r"more than one stateful callback of type `(\w+)`", str(error))) is None:
                raise
            raise ValueError(
                f"The Trainer takes one {second[1]}, and trainer.callbacks has more. Leave out one; `callbacks: [null, "
                "...]` in an overlay drops those before it."
            ) from error

    def instantiate_classes(self) -> None:
        with self._naming_options():
            super().instantiate_classes()

    def _run_subcommand(self, subcommand: str) -> None:
        path = self.config[subcommand].get("ckpt_path")
        with (
            self._naming_options(),
            _removed_if_empty(self.trainer, subcommand == "fit"),
            _said_if_it_does_not_fit(path),
        ):
            super()._run_subcommand(subcommand)

    @contextmanager
    def _naming_options(self) -> Generator[None, None, None]:
        try:
            yield
        except ValueError as error:
            if option := option_of(error, self.config[str(self.subcommand)].as_dict()):
                error.add_note(f"The option is {option}.")
            raise

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            keys = {action.dest for sub in self._subcommand_parsers.values() for action in sub._actions}
            message = explain(error)
            raise ValueError(f"{message.rstrip('.')}. {suggest(message, keys)}".strip()) from error
        trainer = self.config[str(self.config.subcommand)].trainer
        for name, what in _DIVISORS.items():
            if is_number(trainer[name]):  # an interval may be a time, too
                positive(f"trainer.{name}", trainer[name], what)

    def _dump_config(self) -> None:
        """Sets the hyperparameters that Lightning saves, as its own method does, which checks them again."""
        if not hasattr(self, "config_dump"):
            options = {"skip_link_targets": False, "skip_none": False, "skip_validation": True}
            text = self.parser.dump(self.config, format="yaml", **options)
            self.config_dump = yaml.safe_load(text)[str(self.subcommand)]

    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning would let hyperparameters in a checkpoint override the configuration."""


@contextmanager
def _removed_if_empty(trainer: Trainer, trains: bool) -> Generator[None, None, None]:
    loggers = trainer.loggers if trainer.is_global_zero else []  # other ranks would count their own versions
    versions = take_versions(loggers) if trains else []
    logged = [Path(folder) for logger in loggers if (folder := getattr(logger, "log_dir", None)) is not None]
    new = versions + [path for folder in logged for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:  # also Ctrl-C
        if not any((folder / "config.yaml").exists() for folder in logged):  # written when training starts
            _remove(new)
        raise
    if not trains and not trainer.logged_metrics:
        _remove(new, _NO_EVENTS)


def _remove(folders: Iterable[Path], most: float = math.inf) -> None:
    """Removes what loggers write before they log anything, and the folders; event files of at most so many bytes."""
    for folder in folders:
        events = [*folder.glob("events.out.tfevents.*")]
        if all(path.stat().st_size <= most for path in events):
            for path in (*events, folder / "hparams.yaml"):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            folder.rmdir()


@contextmanager
def _said_if_it_does_not_fit(path: str | None) -> Generator[None, None, None]:
    """Raises a ``ValueError`` for a checkpoint that torch, model or optimizer cannot load; errors of memory pass."""
    try:
        yield
    except UnpicklingError:
        if path is not None and Path(path).exists():
            load_checkpoint(path, advice=OBJECTS)
        raise
    except (KeyError, RuntimeError) as error:
        loads = not _LOADING.isdisjoint(frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__))
        is_other = type(error) not in (KeyError, RuntimeError) or "DefaultCPUAllocator" in str(error)
        if path is None or not loads or is_other:
            raise
        config = Path(path).parent.parent / "config.yaml"
        where = f", which are in {config}" if config.exists() else ""
        head, *faults = str(error).splitlines()  # torch lists all tensors below a head
        fault = shorten(faults[0] if faults else f"{type(error).__name__}: {head}", 300).rstrip(".")
        fault += f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise ValueError(
            f"The checkpoint {path} does not fit this run: {fault}. Give the model and the optimizer of its "
            f"run{where}, or another checkpoint."
        ) from error


def check(arguments: Sequence[str]) -> None:
    """Parses a command line of :func:`run`, and creates only the plugin; a ``ValueError`` explains a mistake."""
    _make(_Parsed, arguments)


def make_on_meta(arguments: Sequence[str]) -> "OnMeta":
    """Creates the model, the data module and the plugins of :func:`run` on the meta device; errors as :func:`check`."""
    with torch.device("meta"):
        return _make(OnMeta, arguments)


def _make(kind: type[_CLI], arguments: Sequence[str]) -> _CLI:
    with tempfile.TemporaryDirectory() as folder:
        return kind(
            args=merge_configs(arguments, Path(folder) / "merged.yaml"),
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},  # without a logger all runs share a folder
            parser_kwargs={"prog": "lowbit", **_STRICT} | dict.fromkeys(LightningCLI.subcommands(), _STRICT),
        )


class _Parsed(LowBitCLI):
    """Creates parts of a run, without a Trainer, which would look for devices.

    Sets the attributes ``model`` and ``datamodule`` (None if no part, or not named), and ``plugins``, which check their
    casts: the parser accepts any mapping for them.
    """

    parts: tuple[str, ...] = ()

    def _set_seed(self) -> None: ...

    def before_instantiate_classes(self) -> None: ...

    def instantiate_classes(self) -> None:
        name = str(self.subcommand)
        config = self.config[name]
        plugins = Namespace(plugins=config.trainer.plugins)  # type: ignore[no-untyped-call]
        wanted = Namespace(trainer=plugins, **{part: config[part] for part in self.parts})  # type: ignore[no-untyped-call]
        parts = self._subcommand_parsers[name].instantiate(wanted)
        self.model, self.datamodule = parts.get("model"), parts.get("data")
        self.plugins: list[Any] = as_list(parts.trainer.plugins or [])

    def _run_subcommand(self, subcommand: str) -> None: ...


class OnMeta(_Parsed):
    parts = ("model", "data")
