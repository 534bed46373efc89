"""Temporary phases: who pushes and pops one, and who has the last word."""

import pickle

import pytest

from lightning_lowbit import FP4Precision
from tests.precision.regression_model import fitted


def test_the_last_one_is_in_force_until_its_owner_pops_it():
    plugin = FP4Precision()
    plugin.push_phase("a", "bf16")
    plugin.push_phase("b", "qaf")
    assert plugin.phase == "qaf"
    for owner, phase in (("a", "qaf"), ("b", "fqt"), ("b", "fqt")):
        plugin.pop_phase(owner)
        assert plugin.phase == phase


def test_an_owner_may_keep_its_place_until_another_phase_is_set():
    plugin = FP4Precision()
    with pytest.raises(ValueError, match="Unknown phase 'fp32'"):
        plugin.push_phase("a", "fp32")
    assert not plugin.has_pushed("a")
    plugin.push_phase("a", "bf16")
    plugin.push_phase("a", None)
    assert plugin.phase == "fqt" and plugin.has_pushed("a")
    plugin.push_phase("a", "qaf")
    assert pickle.loads(pickle.dumps(plugin)).phase == "qaf"
    plugin.set_phase("bf16")
    assert not plugin.has_pushed("a")
    plugin.pop_phase("a")
    assert plugin.phase == "bf16"


def test_layers_follow():
    model = fitted(plugin := FP4Precision(quantize_output=True), max_steps=1).lightning_module
    full = model.head.full_casts
    plugin.push_phase("a", "qaf")
    assert model.head.casts == full.phase("qaf") != full
    plugin.pop_phase("a")
    assert model.head.casts == full
