"""The layers of a run, without a plugin and a Trainer."""

import copy

import torch
from torch import nn

from lightning_lowbit.nn.conversion.convert import plan
from lightning_lowbit.precision.layers import RunLayers
from tests.tables import each


def converted(preset, model):
    layers = RunLayers(seed=3)
    layers.expect(model)
    layers.convert(model, plan(model, preset), torch.float32)
    return layers


def step(layers, model, x):
    model.zero_grad()
    with layers.forward_context(torch.float32):
        layers.record(True)
        y = model(x)
        y.square().sum().backward()
    layers.advance()
    return [y, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


@each("preset", ["nvfp4", "fp8-delayed"])
def test_a_loaded_state_goes_on_to_the_bit(preset):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), torch.randn(16, 32)
    other = copy.deepcopy(model)
    layers = converted(preset, model)
    step(layers, model, x)
    layers.set_casts({"0": "bf16"})
    step(layers, model, 2 * x)
    layers.set_phase("qaf")
    state = layers.state_dict()
    restored = converted(preset, other)
    restored.load_casts(state)
    restored.load_state_dict(state)
    assert (restored.step, restored.phase, restored.casts_of("0")) == (2, "qaf", layers.casts_of("0"))
    for one in (layers, restored):
        one.set_phase("fqt")
    for expected, result in zip(step(layers, model, x), step(restored, other, x), strict=True):
        assert torch.equal(expected, result)
