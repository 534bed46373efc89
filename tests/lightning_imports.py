"""Every name of Lightning that tests of plugins and callbacks use, from the Lightning that the package uses.

``LOWBIT_TEST_LIGHTNING=pytorch_lightning pytest tests/precision tests/callbacks`` runs them under the other one: it is
imported before the package, by conftest.py in the process of pytest, and by launch.py in those that tests start.
"""

# ruff: noqa: F401
import os
import sys
from importlib import import_module
from unittest.mock import patch

import yaml

from lightning_lowbit._lightning import (
    NAME,
    AsyncCheckpointIO,
    Callback,
    DeepSpeedStrategy,
    LightningCLI,
    LightningModule,
    MisconfigurationException,
    ModelCheckpoint,
    SaveConfigCallback,
    SIGTERMException,
    SLURMEnvironment,
    TQDMProgressBar,
    Trainer,
    fabric,
    pytorch,
)

assert os.environ.get("LOWBIT_TEST_LIGHTNING", "lightning.pytorch") == NAME, f"the package uses {NAME}"

_boring = import_module(f"{NAME}.demos.boring_classes")
BoringModel, RandomDataset = _boring.BoringModel, _boring.RandomDataset

CSVLogger = pytorch.loggers.CSVLogger
DummyLogger = pytorch.loggers.logger.DummyLogger
MLFlowLogger = pytorch.loggers.MLFlowLogger
WandbLogger = pytorch.loggers.WandbLogger
Checkpoint = pytorch.callbacks.Checkpoint
LearningRateMonitor = pytorch.callbacks.LearningRateMonitor
RichProgressBar = pytorch.callbacks.RichProgressBar
TensorBoardLogger = pytorch.loggers.TensorBoardLogger

DDPStrategy = pytorch.strategies.DDPStrategy
FSDPStrategy = pytorch.strategies.FSDPStrategy
MixedPrecision = pytorch.plugins.precision.MixedPrecision
ModelParallelStrategy = pytorch.strategies.ModelParallelStrategy
TorchCheckpointIO = pytorch.plugins.io.TorchCheckpointIO
SingleDeviceStrategy = pytorch.strategies.SingleDeviceStrategy
SingleDeviceXLAStrategy = pytorch.strategies.SingleDeviceXLAStrategy
Strategy = pytorch.strategies.Strategy
XLAStrategy = pytorch.strategies.XLAStrategy

Fabric = fabric.Fabric

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def quiet_trainer(*plugins, **kwargs):
    """A Trainer on the CPU that logs, saves and shows nothing unless it is told to."""
    return Trainer(**{"accelerator": "cpu", "plugins": [*plugins], **QUIET, **kwargs})


def from_yaml(trainer, model=BoringModel):
    """The Trainer that Lightning's command line makes of a configuration of one, in YAML."""
    defaults = {"logger": False, "enable_checkpointing": False}
    config = {"seed_everything": 1, "trainer": {**defaults, **yaml.safe_load(trainer)}}
    options = {"run": False, "save_config_callback": None, "auto_configure_optimizers": False}
    with patch.object(sys, "argv", ["train.py"]):
        return LightningCLI(model, args=config, **options).trainer
