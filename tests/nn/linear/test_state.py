"""The attribute ``lowbit`` of converted modules."""

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import convert
from lightning_lowbit.nn import AmaxHistories, LayerKeys
from lightning_lowbit.nn.layers.classes import restore_classes
from tests.tables import each

PICKLED = Path(__file__).parents[2] / "data" / "older_version_model.pt"


@each("make", [lambda: nn.Linear(8, 8), lambda: Conv1D(8, 8), lambda: nn.Conv2d(8, 8, 3)])
def test_a_converted_module_has_one_more_attribute(make):
    layer = make()
    before, buffers = {*vars(layer)}, dict(layer.named_buffers())
    model = convert(nn.Sequential(layer), "nvfp4", save="codes", exact=True)
    LayerKeys(model), AmaxHistories(model)
    assert {*vars(layer)} - before == {"lowbit"}
    assert dict(layer.named_buffers()) == buffers
    assert {*vars(restore_classes(model)[0])} == before


def test_models_that_earlier_versions_pickled_are_those_that_they_were():
    """Pickled in the middle of a training: keys, amaxes and settings were attributes of the layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # modules have moved since
        model = torch.load(PICKLED, weights_only=False)
    layer, projection = model[0], model[1].part("in_proj")
    state = layer.lowbit
    assert not {"keys", "amaxes", "casts", "is_left"} & {*vars(layer), *vars(projection)}
    assert (str(layer.casts), str(layer.full_casts), str(projection.casts)) == ("fp8-delayed", "fp8-delayed", "nvfp4")
    assert (state.exact, state.save, state.backend, state.name_in_model) == (True, "codes", "auto", "0")
    assert (state.keys[:2].tolist(), projection.lowbit.keys[:2].tolist()) == (
        [-7601345815495741501, 8997635601773097755],
        [-3023547749807303853, -4913068129765592852],
    )
    assert state.amaxes.in_force.tolist()[:2] == [3.9300038814544678, 0.35147911310195923]
    assert state.amaxes.switch is None, "nothing renews them"
    assert (state.plugin_is_gone, projection.lowbit.plugin_is_gone) == (False, True), "nvfp4 draws random bits"
    assert state.readers is model[1].out_proj.lowbit.readers
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        assert model.eval()[0](x).double().sum().item() == 3.2280804961919785


@each("copied", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_a_state_of_its_own(copied):
    model = convert(nn.Sequential(nn.Linear(8, 8)), "fp8-delayed")
    LayerKeys(model), AmaxHistories(model)
    layer = model[0]
    layer.lowbit.weight_amax = torch.tensor(2.0)
    before = {name: getattr(layer.lowbit, name) for name in type(layer.lowbit).__slots__}
    twin = copied(layer)
    assert (twin.lowbit.weight_amax, twin.lowbit.amaxes.switch) == (None, None)
    twin.casts = layer.casts.phase("hp-forward")
    twin.lowbit.exact = True
    assert all(getattr(layer.lowbit, name) is value for name, value in before.items()), "the original has changed"


def test_casts_may_be_set():
    layer = convert(nn.Linear(8, 8), "nvfp4")
    layer.casts = layer.full_casts.phase("hp-forward")
    assert layer.lowbit.casts != layer.lowbit.full_casts == layer.full_casts
    with pytest.raises(AttributeError):
        layer.full_casts = layer.casts


def test_a_setting_under_its_former_name_is_set_with_a_warning():
    layer = convert(nn.Linear(8, 8), "nvfp4")
    with pytest.warns(DeprecationWarning, match="layer's exact is now lowbit.exact"):
        layer.exact = True
    with pytest.warns(DeprecationWarning, match="layer's is_left is now lowbit.plugin_is_gone"):
        layer.is_left = True
    assert layer.lowbit.exact and layer.lowbit.plugin_is_gone
    assert not {"exact", "is_left"} & vars(layer).keys()


def test_an_attribute_that_a_module_had_under_such_a_name_stays_its_own():
    layer = nn.Linear(8, 8)
    layer.save = "mine"
    convert(layer, "nvfp4")
    layer.save = "still mine"
    assert (vars(layer)["save"], layer.lowbit.save) == ("still mine", "inputs")
