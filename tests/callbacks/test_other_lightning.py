"""Every callback refuses a Trainer of the Lightning that the package does not use."""

from importlib import import_module

import pytest

import lightning_lowbit
from lightning_lowbit import QuantizationMonitor, callbacks
from lightning_lowbit._lightning import NAME, OTHER
from tests.lightning_imports import Callback, MisconfigurationException

CALLBACKS = [
    member
    for name in callbacks.__all__
    if isinstance(member := getattr(lightning_lowbit, name), type) and issubclass(member, Callback)
]
QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def test_every_callback_refuses_the_other_trainer_in_setup():
    trainer = import_module(OTHER).Trainer(**QUIET)
    assert len(CALLBACKS) >= 16
    for kind in CALLBACKS:
        with pytest.raises(
            MisconfigurationException, match=f"Trainer is of {OTHER}. {kind.__name__} goes with .* {NAME}"
        ):
            object.__new__(kind).setup(trainer, None, "fit")


def test_the_other_trainer_does_not_run_with_a_callback_that_would_see_nothing():
    model = import_module(f"{OTHER}.demos.boring_classes").BoringModel()
    trainer = import_module(OTHER).Trainer(callbacks=[QuantizationMonitor()], max_steps=1, **QUIET)
    with pytest.raises(MisconfigurationException, match=f"To use {OTHER}, import it before"):
        trainer.fit(model)
