"""Chooses the Lightning package of this process, and holds every name that lightning_lowbit needs of it.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code with different classes. The first import of this
module chooses the one that was imported first, else ``lightning.pytorch``. Only this module uses private attributes.
"""

import math
import sys
from collections.abc import Callable, Iterable
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info as rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_only as rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_warn as rank_zero_warn

_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def _decide(imported: Iterable[str]) -> str:
    return next((name for name in imported if name in _FABRICS), "lightning.pytorch")


NAME = _decide(sys.modules)
(OTHER,) = _FABRICS.keys() - {NAME}

if TYPE_CHECKING:
    import lightning.fabric as fabric
    import lightning.pytorch as pytorch
    import lightning.pytorch.cli as cli
else:
    pytorch, fabric = import_module(NAME), import_module(_FABRICS[NAME])
    cli = import_module(f"{NAME}.cli")

Callback = pytorch.Callback
LightningDataModule = pytorch.LightningDataModule
LightningModule = pytorch.LightningModule
Trainer = pytorch.Trainer

AsyncCheckpointIO = pytorch.plugins.AsyncCheckpointIO
DeepSpeedStrategy = pytorch.strategies.DeepSpeedStrategy
FSDPPrecision = pytorch.plugins.precision.FSDPPrecision
LightningEnvironment = fabric.plugins.environments.lightning.LightningEnvironment
LightningOptimizer = pytorch.core.optimizer.LightningOptimizer
Precision = pytorch.plugins.precision.Precision
SLURMEnvironment = fabric.plugins.environments.slurm.SLURMEnvironment
TrainerFn = pytorch.trainer.states.TrainerFn

BaseFinetuning = pytorch.callbacks.BaseFinetuning
BasePredictionWriter = pytorch.callbacks.BasePredictionWriter
CSVLogger = pytorch.loggers.CSVLogger
GradientAccumulationScheduler = pytorch.callbacks.GradientAccumulationScheduler
Logger = pytorch.loggers.Logger
MLFlowLogger = pytorch.loggers.MLFlowLogger
ModelCheckpoint = pytorch.callbacks.ModelCheckpoint
ModelPruning = pytorch.callbacks.ModelPruning
ProgressBar = pytorch.callbacks.ProgressBar
StochasticWeightAveraging = pytorch.callbacks.StochasticWeightAveraging
TQDMProgressBar = pytorch.callbacks.TQDMProgressBar
TensorBoardLogger = pytorch.loggers.TensorBoardLogger
Tqdm = pytorch.callbacks.progress.tqdm_progress.Tqdm
WandbLogger = pytorch.loggers.WandbLogger
WeightAveraging = pytorch.callbacks.WeightAveraging

LRSchedulerCallable = cli.LRSchedulerCallable
LightningArgumentParser = cli.LightningArgumentParser
LightningCLI = cli.LightningCLI
OptimizerCallable = cli.OptimizerCallable
SaveConfigCallback = cli.SaveConfigCallback

MisconfigurationException = fabric.utilities.exceptions.MisconfigurationException
OptimizerLRScheduler = pytorch.utilities.types.OptimizerLRScheduler
SIGTERMException = pytorch.utilities.exceptions.SIGTERMException
extract_batch_size = pytorch.utilities.data.extract_batch_size
is_overridden = pytorch.utilities.model_helpers.is_overridden


def both_are_imported() -> bool:
    """Returns whether the process may hold objects of the other Lightning."""
    return OTHER in sys.modules


def goes_with(user: object) -> str:
    """Says which Trainer an object of this package needs, and how to use the other one."""
    return (
        f"{type(user).__name__} goes with the Trainer, LightningModule and callbacks of {NAME} here, not with those of "
        f"{OTHER}. To use {OTHER}, import it before {NAME} and before the first use of lightning_lowbit"
    )


def check_trainer(user: object, trainer: object) -> None:
    """Raises ``MisconfigurationException`` if the Trainer belongs to the other Lightning."""
    if both_are_imported() and isinstance(trainer, sys.modules[OTHER].Trainer):
        raise MisconfigurationException(f"The Trainer is of {OTHER}. {goes_with(user)}.")


@cache
def say_once(text: str) -> None:
    rank_zero_info(text)


def total_steps(trainer: Trainer) -> float:
    """Returns the number of optimizer steps of a run with automatic optimization; infinity if it is unknown.

    Lightning's estimate is -1 for data without a length, and takes the first accumulation for that of all epochs.
    """
    total = trainer.estimated_stepping_batches
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    schedules = [callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)]
    if schedules and trainer.max_epochs != -1 and trainer.num_training_batches < math.inf:
        epochs = range(trainer.max_epochs or 0)
        accumulations = [schedules[-1].get_accumulate_grad_batches(epoch) for epoch in epochs]
        total = sum(math.ceil(trainer.num_training_batches / batches) for batches in accumulations)
        return total if trainer.max_steps == -1 else min(total, trainer.max_steps)
    return math.inf if total == -1 else total


# --- private parts of Lightning ---

is_local = fabric.utilities.cloud_io._is_local_file_protocol  # a path, rather than in an object store
random_states, set_random_states = fabric.utilities.seed._collect_rng_states, fabric.utilities.seed._set_rng_states


def is_logging_step(trainer: Trainer) -> bool:
    """Returns whether loggers record the current optimizer step; the same for all its micro-batches."""
    return trainer._logger_connector.should_update_logs


def is_mid_step(trainer: Trainer) -> bool:
    """Returns whether more micro-batches of the current optimizer step follow."""
    return trainer.fit_loop._should_accumulate()


def logger_step(trainer: Trainer) -> int:
    """Returns the step under which loggers file the current batch: the number of optimizer steps before it."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_validation_of_fit(trainer: Trainer) -> bool:
    """Returns whether a validation belongs to a training, and is no sanity check."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def validation_is_due(trainer: Trainer) -> bool:
    """Returns whether a validation follows this batch. A run resumed from before that validation would skip it."""
    loop = trainer.fit_loop
    is_due = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]
    return bool(is_due) and not loop.epoch_loop.val_loop.skip  # without data, no hook of it is called


def call_around_fetches(
    trainer: Trainer,
    begin: Callable[[int, int], None],
    before: Callable[[int, int], None],
    after: Callable[[], None],
) -> None:
    """Calls functions before the process asks for an iterator of training batches, and before and after each fetch.

    The first two take the epoch and the number of the batch that comes. Without a length of the data, ``begin`` also
    stands for ``before`` at the first fetch. Call it in ``on_fit_start``, and :func:`forget_fetches` when training
    ends. Lightning has no hooks there: it takes the places of methods.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    load, run = type(fit)._load_combined_loader_states, type(loop).on_run_start
    start, stop = type(loop)._on_before_fetch, type(loop)._on_after_fetch

    def on_load() -> None:  # of loaders, in their first epoch
        load(fit)
        epochs: Any = fit.epoch_progress.current
        batches = loop.batch_progress
        is_over = batches.is_last_batch  # of the epoch that is done, or of one whose end Lightning leaves out
        epoch = epochs.processed + (is_over and epochs.processed < epochs.ready)
        begin(epoch, 0 if is_over else batches.current.ready)

    def on_run_start(data_fetcher: Any) -> None:
        if trainer.current_epoch > 0 and not fit.is_resuming and not loop.restarting:  # Lightning's condition
            begin(trainer.current_epoch, 0)
            for loader in data_fetcher.combined_loader.flattened:
                if getattr(loader, "persistent_workers", False):  # the seed of workers, which new ones would be given
                    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        run(loop, data_fetcher)

    def before_fetch() -> None:
        fetcher = fit._data_fetcher
        assert fetcher is not None
        if fetcher.length is not None or fetcher.fetched > 0:
            before(trainer.current_epoch, fetcher.fetched)
        start(loop)

    def after_fetch() -> None:
        stop(loop)
        after()

    fit._load_combined_loader_states, loop.on_run_start = on_load, on_run_start  # type: ignore[method-assign]
    loop._on_before_fetch, loop._on_after_fetch = before_fetch, after_fetch  # type: ignore[method-assign]


def forget_fetches(trainer: Trainer) -> None:
    """Ends what :func:`call_around_fetches` began: functions of a Trainer at rest could not be pickled."""
    for name in ("on_run_start", "_on_before_fetch", "_on_after_fetch"):
        trainer.fit_loop.epoch_loop.__dict__.pop(name, None)
    trainer.fit_loop.__dict__.pop("_load_combined_loader_states", None)


def places_of_prefetched(trainer: Trainer) -> list[Any]:
    """Returns the states of the loaders if Lightning fetches a batch ahead, as it does of data without a length."""
    fetcher, combined = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
    prefetches = fetcher is not None and fetcher.length is None and hasattr(fetcher, "batches")
    return combined._state_dicts() if prefetches and combined is not None else []


def is_ahead(trainer: Trainer) -> bool:
    """Returns whether a batch is fetched that no training step has used."""
    return bool(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def begins_data_anew(trainer: Trainer, places: int) -> bool:
    """Returns whether the data of a run that goes on within an epoch begin anew and Lightning does not say so.

    It goes by the number of steps, which tells nothing for data without a length, or with several optimizers.
    ``places`` is the number of loaders whose place is in the checkpoint.
    """
    combined, batches = trainer.fit_loop._combined_loader, trainer.num_training_batches
    assert combined is not None
    have_state = all(isinstance(loader, fabric.utilities.types._Stateful) for loader in combined.flattened)
    has_length = batches < math.inf and not have_state
    is_said = has_length and trainer.global_step % math.ceil(batches / trainer.accumulate_grad_batches) != 0
    return places < len(combined.flattened) and not is_said


def generators_of_data(trainer: Trainer) -> list[torch.Generator]:
    """Returns the generators that loaders and samplers draw an order from, of loaders that save no state."""
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    names = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator")
    generators = {}
    for loader in loaders:
        for name in () if isinstance(loader, fabric.utilities.types._Stateful) else names:
            generator = reduce(lambda part, attribute: getattr(part, attribute, None), name.split("."), loader)
            if isinstance(generator, torch.Generator):
                generators[id(generator)] = generator
    return [*generators.values()]


def has_ended_loader(trainer: Trainer) -> bool:
    """Returns whether one of several loaders has ended before their epoch, or may have: checkpoints do not tell."""
    loop, combined = trainer.fit_loop, trainer.fit_loop._combined_loader
    if combined is None or len(combined.flattened) < 2:
        return False
    if combined._mode == "max_size_cycle":  # which counts batches if all loaders have a length
        return trainer.num_training_batches == math.inf and any(getattr(combined._iterator, "_consumed", ()))
    lengths = [fabric.utilities.data.sized_len(loader) or 0 for loader in combined.flattened]
    ready = loop.epoch_loop.batch_progress.current.ready
    return combined._mode == "max_size" and min(map(min, lengths, combined.limits or lengths)) <= ready


def update_plateaus(trainer: Trainer, interval: str, epoch: int, batches: int) -> None:
    """Lets schedules that go by a metric take the step that follows a batch or an epoch, if their metrics are known.

    ``epoch`` is the number of whole epochs before it, and ``batches`` that of batches of this epoch up to it.
    """
    plateaus = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if any(config.interval == interval and config.monitor not in logged_metrics(trainer) for config in plateaus):
        return
    loop = trainer.fit_loop
    epochs, ready = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
    place = epochs.completed, ready.ready
    epochs.completed, ready.ready = epoch, batches
    loop.epoch_loop.update_lr_schedulers(interval, update_plateau_schedulers=True)
    epochs.completed, ready.ready = place


def is_within_batch(trainer: Trainer) -> bool:
    """Returns whether the hooks of a training batch are not done, such as ``on_train_batch_end``, which may save."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return bool(total.completed < total.processed)


def begin_next_epoch(trainer: Trainer) -> None:
    """Lets a run that was resumed from the last batch of an epoch begin the next one. Call it in ``on_train_start``.

    Lightning goes on as if within an epoch: it would leave out ``on_train_epoch_start`` and count an epoch too few, and
    without a length of the data also count batches on.
    """
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.current
    if loop.restarted_mid_epoch and epochs.processed == epochs.ready:
        loop.reset_restart_stage()
        loop.epoch_loop.reset_restart_stage()
        loop.epoch_loop.batch_progress.increment_completed()
        steps = loop.epoch_loop.automatic_optimization.optim_progress
        for progress in (loop.epoch_loop.batch_progress, loop.epoch_loop.scheduler_progress, steps):
            progress.reset_on_run()


def forget_restart(trainer: Trainer) -> None:
    """Ends what Lightning leaves out in the first epoch of a resumed run: schedules by a metric, at its end."""
    trainer.fit_loop._restarting = False


def trains_elsewhere(trainer: Trainer) -> bool:
    """Returns whether processes train that end with ``fit``: those of ``ddp_spawn``, ``ddp_fork``, ``ddp_notebook``."""
    return isinstance(trainer.strategy.launcher, pytorch.strategies.launchers._MultiProcessingLauncher)


def logged_metrics(trainer: Trainer) -> dict[str, Any]:
    """Metrics logged so far. ``trainer.callback_metrics`` may start a reduction over processes; this does not."""
    return trainer._logger_connector._callback_metrics


def logged_in_batch(trainer: Trainer) -> dict[str, Any]:
    """Metrics logged so far, also by hooks of this batch that are done. No reduction is due before the epoch ends."""
    is_within_epoch = trainer._logger_connector._first_loop_iter is not None
    return trainer.callback_metrics if is_within_epoch else logged_metrics(trainer)


def forget_logged(trainer: Trainer, names: Iterable[str], hook: str = "on_train_batch_end") -> None:
    """Drops metrics logged in a hook, which Lightning would repeat until the epoch ends, and not after a resume."""
    assert trainer._results is not None
    for name in names:
        trainer._results.pop(f"{hook}.{name}", None)


def take_versions(loggers: Iterable[Any]) -> list[Path]:
    """Makes the folders of loggers that count versions: runs that begin together would share a number. Returns all
    new folders; a ``FileExistsError`` where a file is in the place of one."""
    counters = [logger for logger in loggers if getattr(logger, "_version", "") is None]
    before: list[Path] = []
    while True:
        folders = sorted({Path(logger.log_dir) for logger in counters if is_local(logger.log_dir)})  # parents first
        new = {path for folder in folders for path in (folder, *folder.parents) if not path.exists()}
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=folder in before)  # there: the version does not count folders
            return sorted(new, reverse=True)
        except FileExistsError as error:
            if not Path(error.filename).is_dir():
                raise
            for logger in counters:  # another run was faster
                logger._version = None
            before = folders


def cluster_environment(trainer: Trainer) -> Any:
    return trainer._accelerator_connector.cluster_environment


def checkpoint_folder(checkpoint: ModelCheckpoint, trainer: Trainer) -> Any:
    return checkpoint._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
