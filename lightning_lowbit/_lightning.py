"""Which of the two Lightnings this process uses, and every name of it that the package needs.

Lightning is installed twice: as ``lightning.pytorch`` and as ``pytorch_lightning``. The code is the same, the classes
are not: a plugin of one is none to the Trainer of the other. The first import of this module decides, once, for the one
that was imported first, and for ``lightning.pytorch`` where neither was. (Packages that use ``pytorch_lightning`` may
import both: neuralforecast does, through ray.)
"""

import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.apply_func import apply_to_collection as apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info as rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_only as rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_warn as rank_zero_warn

_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def _decide(imported: Iterable[str]) -> str:
    """The Lightning to use, of modules in the order in which they were imported."""
    return next((name for name in imported if name in _FABRICS), "lightning.pytorch")


NAME = _decide(sys.modules)
(OTHER,) = _FABRICS.keys() - {NAME}

if TYPE_CHECKING:
    import lightning.fabric as fabric
    import lightning.pytorch as pytorch
    import lightning.pytorch.cli as cli
    import lightning.pytorch.trainer.connectors.logger_connector.result as result
else:
    pytorch, fabric = import_module(NAME), import_module(_FABRICS[NAME])
    cli = import_module(f"{NAME}.cli")
    result = import_module(f"{NAME}.trainer.connectors.logger_connector.result")

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

CSVLogger = pytorch.loggers.CSVLogger
DummyLogger = pytorch.loggers.logger.DummyLogger
Logger = pytorch.loggers.Logger
MLFlowLogger = pytorch.loggers.MLFlowLogger
ModelCheckpoint = pytorch.callbacks.ModelCheckpoint
TQDMProgressBar = pytorch.callbacks.TQDMProgressBar
TensorBoardLogger = pytorch.loggers.TensorBoardLogger
Tqdm = pytorch.callbacks.progress.tqdm_progress.Tqdm
WandbLogger = pytorch.loggers.WandbLogger

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
is_param_in_hook_signature = pytorch.utilities.signature_utils.is_param_in_hook_signature

_ResultCollection = result._ResultCollection
_collect_rng_states = fabric.utilities.seed._collect_rng_states
_is_local_file_protocol = fabric.utilities.cloud_io._is_local_file_protocol
_set_rng_states = fabric.utilities.seed._set_rng_states


def both_are_imported() -> bool:
    """Whether objects of the other Lightning may be about."""
    return OTHER in sys.modules


def goes_with(user: object) -> str:
    """Which Trainer an object of this package goes with, and what to do for the other one."""
    return (
        f"{type(user).__name__} goes with the Trainer, LightningModule and callbacks of {NAME} here, not with those of "
        f"{OTHER}. To use {OTHER}, import it before {NAME} and before the first use of lightning_lowbit"
    )


def check_trainer(user: object, trainer: object) -> None:
    """Refuses a Trainer of the other Lightning.

    Raises:
        MisconfigurationException: it is one.
    """
    if both_are_imported() and isinstance(trainer, sys.modules[OTHER].Trainer):
        raise MisconfigurationException(f"The Trainer is of {OTHER}. {goes_with(user)}.")


@cache
def say_once(text: str) -> None:
    """Logs a line, the first time."""
    rank_zero_info(text)


# --- private parts of Lightning ---


def is_logging_step(trainer: Trainer) -> bool:
    """Whether the logger takes what the optimizer step under way logs; the same for all its micro-batches."""
    return trainer._logger_connector.should_update_logs


def is_mid_step(trainer: Trainer) -> bool:
    """Whether more micro-batches of the optimizer step under way follow the current one."""
    return trainer.fit_loop._should_accumulate()


def logged_metrics(trainer: Trainer) -> dict[str, Any]:
    """What was logged so far, without the reduction over processes that ``trainer.callback_metrics`` may start."""
    return trainer._logger_connector._callback_metrics
