"""Every callback refuses a Trainer of the Lightning that the package does not use."""

from importlib import import_module

import pytest

from lightning_lowbit import QuantizationMonitor, callbacks
from lightning_lowbit._lightning import NAME, OTHER
from tests.lightning_imports import Callback, MisconfigurationException

CALLBACKS = [
    member
    for name in callbacks.__all__
    if isinstance(member := getattr(callbacks, name), type) and issubclass(member, Callback)
]


def test_every_callback_refuses_the_other_trainer():
    def trainer(*others):
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        return import_module(OTHER).Trainer(accelerator="cpu", max_steps=1, callbacks=[*others], **quiet)

    assert len(CALLBACKS) >= 16
    for kind in CALLBACKS:
        words = f"Trainer is of {OTHER}. {kind.__name__} goes with .* {NAME}"
        with pytest.raises(MisconfigurationException, match=words):
            object.__new__(kind).setup(trainer(), None, "fit")
    with pytest.raises(MisconfigurationException, match=f"To use {OTHER}, import it before"):
        trainer(QuantizationMonitor()).fit(import_module(f"{OTHER}.demos.boring_classes").BoringModel())
