"""Modules under their former names."""

import importlib
import sys

import pytest

from lightning_lowbit._finders import MOVED


def test_every_former_name_warns_and_gives_what_its_modules_hold():
    for former, modules in MOVED.items():
        sys.modules.pop(f"lightning_lowbit.{former}", None)  # another test may have read a pickle of a former version
        with pytest.warns(DeprecationWarning, match=f"lightning_lowbit.{former} is now lightning_lowbit.{modules[0]}"):
            module = importlib.import_module(f"lightning_lowbit.{former}")
        for name in modules:
            source = importlib.import_module(f"lightning_lowbit.{name}")
            values = vars(source).items()
            defined = [
                key for key, value in values if getattr(value, "__module__", "") == source.__name__ and key[:2] != "__"
            ]
            assert all(getattr(module, key) is getattr(source, key) for key in defined)


def test_a_former_name_refuses_what_no_module_holds():
    with pytest.warns(DeprecationWarning):
        keys = importlib.reload(importlib.import_module("lightning_lowbit.nn.keys"))
    with pytest.raises(AttributeError, match="lightning_lowbit.nn.state.keys and .* has no attribute 'nothing'"):
        keys.nothing  # noqa: B018


def test_a_class_with_another_name_is_found_in_a_former_module():
    with pytest.warns(DeprecationWarning):
        plan = importlib.reload(importlib.import_module("lightning_lowbit.nn.plan"))
    assert plan.Plan is importlib.import_module("lightning_lowbit.nn.casts.traits").CastTraits
