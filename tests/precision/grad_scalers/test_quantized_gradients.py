"""Quantized gradients under a scaled loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from lightning_lowbit import Cast, ConservativeGradScaler, LinearCasts, Scale, convert, quantize
from lightning_lowbit.nn import PRESETS as CASTS
from lightning_lowbit.nn import AmaxHistories, LayerKeys
from lightning_lowbit.precision.grad_scalers import overflow
from tests.precision.grad_scalers.scalers import INF, NAN, PROFILE, make
from tests.tables import each


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(40, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Quantized:
    """A model of two quantized layers, and the gradients of its loss."""

    def __init__(self, casts):
        torch.manual_seed(0)
        self.model = convert(Tiny(), casts)
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


@each("name", CASTS)
def test_a_power_of_two_does_not_change_gradients(name):
    """Scales follow the tensor, so that a power of two comes out again, through stochastic rounding too."""
    layers = Quantized(name)
    expected = layers.gradients()
    for exponent in (-12, 3, 18):
        found = layers.gradients(2.0**exponent)
        assert_same_gradients(found, expected, f"{name} and a loss scale of 2^{exponent}")


@pytest.mark.parametrize("name", [name for name in CASTS if LinearCasts.preset(name).is_delayed])
def test_delayed_scales_follow_the_loss_scale(name):
    """What is remembered of gradients is multiplied with what the loss is, once the scale has moved."""
    layers = Quantized(name)

    def second_step(factor):
        histories = AmaxHistories(layers.model)
        layers.gradients(1.0, histories)
        histories.advance_()
        histories.scale_gradients_(torch.tensor(factor))
        return layers.gradients(factor, histories, x=torch.randn(20, 40, generator=torch.Generator().manual_seed(2)))

    expected = second_step(1.0)
    for exponent in (-12, 3, 18):
        assert_same_gradients(second_step(2.0**exponent), expected, f"{name} and a scale that moved by 2^{exponent}")


def gradient_casts():
    """All casts that a preset has for output gradients, by what they print."""
    both = [getattr(LinearCasts.preset(name), operand) for name in CASTS for operand in ("dgrad_g", "wgrad_g")]
    return {str(cast): cast for cast in both if isinstance(cast, Cast)}


def scaled_and_not(x, cast, exponent):
    """What a cast makes of a tensor, and of the tensor times 2^exponent, divided by it again."""
    return (
        quantize(x * 2.0**exponent, cast, key=7).dequantize() / 2.0**exponent,
        quantize(x, cast, key=7).dequantize(),
    )


@pytest.mark.parametrize("name", gradient_casts())
@settings(PROFILE, max_examples=10)
@given(seed=st.integers(0, 2**32), exponent=st.integers(-40, 40), spread=st.floats(0, 4))
def test_a_power_of_two_does_not_change_a_cast(name, seed, exponent, spread):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(2, 80, generator=generator))
    x = (torch.randn(2, 80, generator=generator) * sizes).bfloat16()
    found, expected = scaled_and_not(x, gradient_casts()[name], exponent)
    assert torch.equal(found, expected), f"{name}: times 2^{exponent} {(found != expected).sum()} elements differ"


ONE_LEVEL = Cast("e2m1", Scale("e4m3", 16))


def test_scales_in_few_bits_without_a_second_level_need_the_right_loss_scale():
    """Not so for scales in E4M3 alone: they reach from 2^-9 to 448, saturate beyond, and vanish below.

    No preset has them for gradients. Within the range, where scales have all their digits, they keep what they are.
    """
    assert not any(
        cast.scale.format != "e8m0" and cast.scale.format != "fp32" and not cast.scale.two_level
        for cast in gradient_casts().values()
    )
    x = torch.randn(4, 64)
    found, expected = scaled_and_not(x, ONE_LEVEL, 3)
    assert torch.equal(found, expected)
    saturated, _ = scaled_and_not(x, ONE_LEVEL, 18)
    assert saturated.abs().max() == 448 * 6 / 2.0**18, "elements end at the largest scale times the largest level"
    vanished, _ = scaled_and_not(x, ONE_LEVEL, -18)
    assert not vanished.any(), "elements vanish under the smallest scale"


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
