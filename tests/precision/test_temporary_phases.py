"""Temporary phases: who pushes and pops one, and who has the last word."""

import pickle

import pytest

from lightning_lowbit import FP4Precision
from tests.precision.regression_model import Regression, trainer


def test_the_last_one_is_in_force_until_its_owner_pops_it():
    plugin = FP4Precision()
    plugin.push_phase("a", "bf16")
    plugin.push_phase("b", "qaf")
    assert plugin.phase == "qaf"
    plugin.pop_phase("a")
    assert plugin.phase == "qaf"
    plugin.pop_phase("b")
    assert plugin.phase == "fqt"
    plugin.pop_phase("b")
    assert plugin.phase == "fqt"


def test_whoever_sets_a_phase_ends_temporary_ones():
    plugin = FP4Precision()
    plugin.push_phase("a", "bf16")
    plugin.set_phase("bf16")
    assert not plugin.has_pushed("a")
    plugin.pop_phase("a")
    assert plugin.phase == "bf16"


def test_an_owner_may_keep_its_place():
    plugin = FP4Precision()
    plugin.push_phase("a", "bf16")
    plugin.push_phase("a", None)
    assert plugin.phase == "fqt" and plugin.has_pushed("a")
    plugin.push_phase("a", "qaf")
    assert pickle.loads(pickle.dumps(plugin)).phase == "qaf"


def test_layers_follow():
    model, plugin = Regression(), FP4Precision(quantize_output=True)
    trainer(plugin, max_steps=1).fit(model)
    full = model.head.full_casts
    plugin.push_phase("a", "qaf")
    assert model.head.casts == full.phase("qaf") != full
    plugin.pop_phase("a")
    assert model.head.casts == full


def test_an_unknown_phase_changes_nothing():
    plugin = FP4Precision()
    with pytest.raises(ValueError, match="Unknown phase 'fp32'"):
        plugin.push_phase("a", "fp32")
    assert not plugin.has_pushed("a")
