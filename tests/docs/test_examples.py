"""The recipe, callback and precision plugin of docs/examples work, and each fits on a screen."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import lightning_lowbit
from lightning_lowbit.cli import main
from lightning_lowbit.nn import QuantLinear
from tests.lightning_imports import quiet_trainer
from tests.tables import each

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FILES = [EXAMPLES / name for name in ("digits.py", "digits.yaml", "hybrid_precision.py", "weight_noise.py")]


@pytest.fixture
def examples(monkeypatch):
    """The folder as the first place for imports."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for file in FILES:
        monkeypatch.delitem(sys.modules, file.stem, raising=False)


@each("file", FILES)
def test_it_is_short(file):
    assert len(file.read_text().splitlines()) < 40


def test_the_recipe_trains_with_the_callback(examples, monkeypatch):
    weight_noise = import_module("weight_noise")
    ended = []
    monkeypatch.setattr(weight_noise.WeightNoise, "teardown", lambda self, *_, **__: ended.append(self), raising=False)
    main(["fit", "--config", str(EXAMPLES / "digits.yaml")])
    (callback,) = ended
    assert list(callback.sqnr) == ["body"], "head is skipped"
    assert 15 < callback.report_data(None)["weight_sqnr"]["body"] < 25
    assert callback.report_alerts(None) == []
    callback.least = 30.0
    assert callback.report_alerts(None)[0].startswith("body: the weight has ")


def test_the_plugin_trains_with_the_casts_of_both_presets(examples):
    plugin = import_module("hybrid_precision").HybridPrecision()
    model = import_module("digits").Digits(lr=1e-2)
    before = model.body.weight.detach().clone()
    quiet_trainer(plugin, max_steps=3).fit(model)
    forward, backward = (lightning_lowbit.LinearCasts.preset(name) for name in ("mxfp8", "mxfp4"))
    assert isinstance(model.body, QuantLinear)
    assert model.body.casts.fprop_w == forward.fprop_w
    assert model.body.casts.wgrad_g == backward.wgrad_g
    assert not torch.equal(model.body.weight, before)
