"""Quantized gradients under a scaled loss."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_lowbit import ConservativeGradScaler, LinearCasts, convert
from lightning_lowbit.nn import PRESETS as CASTS
from lightning_lowbit.nn import AmaxHistories, LayerKeys
from lightning_lowbit.precision.grad_scalers import overflow
from tests.precision.grad_scalers.scalers import INF, NAN, make
from tests.tables import each

EXPONENTS = (-30, -12, 3, 18)  # of loss scales


class Quantized:
    """A model of two quantized layers, and the gradients of its loss."""

    def __init__(self, casts):
        torch.manual_seed(0)
        self.model = convert(nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8)), casts)
        self.keys = LayerKeys(self.model)

    def gradients(self, factor=1.0, histories=None, x=None):
        """Of the loss times a factor, divided by it again; by name of the parameter, and of the input.

        Args:
            histories: those of delayed scaling; None for fresh ones.
        """
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(20, 40, generator=generator) if x is None else x
        if histories is None:
            AmaxHistories(self.model)
        self.keys.fill_(0)  # the same bits in each pass
        self.model.zero_grad()
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(x).float().square().sum()
        (loss * factor).backward()
        named = {"x": x, **dict(self.model.named_parameters())}
        return {name: tensor.grad / factor for name, tensor in named.items() if tensor.grad is not None}


def assert_same_gradients(found, expected, what):
    assert found.keys() == expected.keys() and len(found) == 5
    for name, gradient in expected.items():
        assert gradient.isfinite().all() and gradient.any(), f"{what}: the gradient of {name} shows nothing"
        differ = (found[name] != gradient).sum().item()
        assert not differ, f"{what}: {differ} of {gradient.numel()} elements of the gradient of {name} differ"


@each("name", CASTS, fast=6)
def test_a_power_of_two_does_not_change_gradients(name):
    """Scales follow the tensor, so that a power of two comes out again, through stochastic rounding too."""
    layers = Quantized(name)
    expected = layers.gradients()
    for exponent in EXPONENTS:
        found = layers.gradients(2.0**exponent)
        assert_same_gradients(found, expected, f"{name} and a loss scale of 2^{exponent}")


@pytest.mark.parametrize("name", [name for name in CASTS if LinearCasts.preset(name).is_delayed])
def test_delayed_scales_follow_the_loss_scale(name):
    layers = Quantized(name)

    def second_step(factor):
        histories = AmaxHistories(layers.model)
        layers.gradients(1.0, histories)
        histories.advance_()
        histories.scale_gradients_(torch.tensor(factor))
        return layers.gradients(factor, histories, x=torch.randn(20, 40, generator=torch.Generator().manual_seed(2)))

    expected = second_step(1.0)
    for exponent in EXPONENTS:
        assert_same_gradients(second_step(2.0**exponent), expected, f"{name} and a scale that moved by 2^{exponent}")


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_reaches_the_gradients(name, bad):
    """A scaler looks at gradients of parameters: one element of an output gradient has to be found in them."""
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 8)), name)
    AmaxHistories(model)
    LayerKeys(model).fill_(0)
    x = torch.randn(20, 40, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        y = model(x)
    assert y.dtype == torch.float16
    g = torch.randn(20, 8).half()
    g[3, 5] = bad
    y.backward(g)
    for what, tensor in (("x", x), *model.named_parameters()):
        assert not tensor.grad.isfinite().all(), f"{name}: {bad} is not seen in the gradient of {what}"
    scaler = make(ConservativeGradScaler)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(SGD([model[0].weight], lr=0.1))
    assert overflow(scaler) == torch.tensor(True)
