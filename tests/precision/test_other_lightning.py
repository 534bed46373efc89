"""A Trainer or a model of the Lightning that the package does not use is refused, and told which one goes with it."""

from importlib import import_module

import pytest

from lightning_lowbit import FP4Precision
from lightning_lowbit._lightning import NAME, OTHER
from lightning_lowbit.nn import QuantLinear
from tests.lightning_imports import QUIET, BoringModel, quiet_trainer

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
