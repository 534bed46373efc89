"""What an earlier version called otherwise: it works, and says what to import."""

import importlib
import sys

import pytest

import lightning_lowbit
from lightning_lowbit.precision import grad_scalers


def test_the_former_module_of_the_scalers_warns_and_has_the_same_classes():
    sys.modules.pop("lightning_lowbit.scalers", None)
    with pytest.warns(DeprecationWarning, match="import scalers from lightning_lowbit"):
        former = importlib.import_module("lightning_lowbit.scalers")
    names = [name for name in lightning_lowbit.__all__ if name.endswith("GradScaler")]
    assert names
    for name in names:
        assert getattr(former, name) is getattr(lightning_lowbit, name) is getattr(grad_scalers, name)
