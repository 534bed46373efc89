"""Trainers and models of the Lightning that the package does not use are refused, and told which one goes with it."""

from importlib import import_module

import pytest

from lightning_lowbit import FP4Precision, QuantizationMonitor, callbacks
from lightning_lowbit._lightning import NAME, OTHER
from lightning_lowbit.nn import QuantLinear
from tests.lightning_imports import QUIET, BoringModel, Callback, MisconfigurationException, quiet_trainer

other = import_module(OTHER)
REMEDY = f"To use {OTHER}, import it before {NAME} and before the first use of lightning_lowbit"


def test_the_other_trainer_says_which_one_takes_the_plugin():
    with pytest.raises(Exception, match=f"FP4Precision goes with the Trainer, .* of {NAME}.*{REMEDY}"):
        other.Trainer(plugins=[FP4Precision()], accelerator="cpu", **QUIET)


def test_a_line_says_which_model_goes_with_the_plugin_before_the_trainer_refuses_the_other(told):
    class Net(other.LightningModule):
        """Holds nothing."""

    with pytest.raises(TypeError, match="got `.*Net`"):
        quiet_trainer(FP4Precision()).fit(Net())
    assert [REMEDY in line for line in told.messages if "goes with" in line] == [True]


def test_the_plugin_and_its_own_trainer_train_where_both_lightnings_are_imported():
    model = BoringModel()
    quiet_trainer(FP4Precision(), max_steps=1).fit(model)
    assert isinstance(model.layer, QuantLinear)


def test_every_callback_refuses_the_other_trainer():
    def trainer(*others):
        return other.Trainer(accelerator="cpu", max_steps=1, callbacks=[*others], **QUIET)

    members = [getattr(callbacks, name) for name in callbacks.__all__]
    kinds = [member for member in members if isinstance(member, type) and issubclass(member, Callback)]
    assert len(kinds) >= 16
    for kind in kinds:
        words = f"Trainer is of {OTHER}. {kind.__name__} goes with .* {NAME}"
        with pytest.raises(MisconfigurationException, match=words):
            object.__new__(kind).setup(trainer(), None, "fit")
    with pytest.raises(MisconfigurationException, match=REMEDY.partition(" and before the first")[0]):
        trainer(QuantizationMonitor()).fit(import_module(f"{OTHER}.demos.boring_classes").BoringModel())
